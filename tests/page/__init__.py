"""The page of `minidp report --html`, in a real browser."""
