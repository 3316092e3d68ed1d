"""Validate and freeze options; read them from outside the script.

Read `options` (the options of the core), then `overrides` (environment variables and
command-line options that replace arguments; texts that say how to pass an option).
"""

from .options import (
    AUDIT_STEPS,
    AUTO,
    MIB,
    UNLIMITED,
    AuditAction,
    AverageOver,
    BucketCaps,
    OwnOptions,
    ReducerConfig,
    SavedLayout,
    Unsynced,
    bucket_caps,
)
from .overrides import (
    NONE,
    OPTIONS,
    PREFIX,
    RUN,
    VARIABLES,
    add_options,
    hint_from_outside,
    misspelt,
    note_swapped,
    numbered,
    passing,
    read_environment,
    replacements,
    setting,
    variables,
)

__all__ = ["AUDIT_STEPS", "AUTO", "MIB", "NONE", "OPTIONS", "PREFIX", "RUN"]
__all__ += ["VARIABLES"]
__all__ += ["UNLIMITED", "BucketCaps", "OwnOptions", "ReducerConfig"]
__all__ += [
    "AuditAction",
    "AverageOver",
    "SavedLayout",
    "Unsynced",
    "add_options",
    "hint_from_outside",
]
__all__ += ["bucket_caps", "misspelt", "note_swapped", "numbered", "passing"]
__all__ += ["read_environment", "replacements", "setting", "variables"]
