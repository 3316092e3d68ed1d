"""A plugin of pytest that replaces torch's DDP before torchft is imported."""

import minidp

minidp.swap()
