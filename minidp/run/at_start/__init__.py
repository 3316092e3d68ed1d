"""A PYTHONPATH folder, only for `sitecustomize`, which Python imports first."""
