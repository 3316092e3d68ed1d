"""Validate and freeze options; read them from outside the script.

Read `options` (the options of the core), then `overrides` (environment variables and
command-line options that replace arguments; texts that say how to pass an option).
"""

from .options import (
    AUTO,
    HANG_SECONDS,
    MIB,
    UNLIMITED,
    AverageOver,
    BucketCaps,
    ReducerConfig,
    Safety,
    SavedLayout,
    Unsynced,
    averages_items,
    bucket_caps,
    is_auto,
)
from .overrides import (
    NONE,
    OPTIONS,
    PREFIX,
    RUN,
    add_options,
    aside,
    misspelt,
    note_swapped,
    numbered,
    passing,
    read_environment,
    replacements,
    setting,
    variables,
)

__all__ = ["AUTO", "HANG_SECONDS", "MIB", "NONE", "OPTIONS", "PREFIX", "RUN"]
__all__ += ["UNLIMITED", "BucketCaps", "ReducerConfig", "Safety", "SavedLayout"]
__all__ += ["Unsynced", "add_options", "aside", "bucket_caps", "is_auto", "misspelt"]
__all__ += ["note_swapped", "numbered", "passing", "read_environment", "replacements"]
__all__ += ["AverageOver", "averages_items", "setting", "variables"]
