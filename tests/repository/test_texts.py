"""Examples in texts that are files, too, and are run there."""

from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_example_of_a_simulated_device_is_the_one_that_runs():
    source = (TESTS / "accelerator" / "test_example.py").read_text()
    code = source.split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in (TESTS / "README.md").read_text()
