"""A folder for PYTHONPATH, see `sitecustomize`; nothing else may lie in it."""
