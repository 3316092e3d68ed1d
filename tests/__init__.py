"""The tests; a package, so that rank processes can import a test's functions."""
