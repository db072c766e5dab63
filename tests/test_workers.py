"""How tests are divided among processes."""

import pytest

from tests.workers import group


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("tests/samplers/test_sglang_real.py", "sglang"),
        ("tests/parity/test_sglang_experts.py", "sglang"),
        ("tests/server/test_xorl_client.py", "sglang"),
        ("tests/server/test_xorl_sglang.py", "sglang"),
        ("tests/widgets/test_browser.py", "browser"),
        ("tests/lab/test_browser_inside.py", "browser"),
        ("tests/lab/test_lab.py", "tests/lab/test_lab.py"),
        ("xorl_lab/nowhere.ini", "xorl_lab/nowhere.ini"),
    ],
)
def test_files_that_share_something_are_run_by_one_process(file, wanted):
    assert group(file) == wanted


def test_pytest_asks_for_the_groups(pytestconfig):
    """A worker is told everything of its group, and of nothing else until that is done."""
    hooks = pytestconfig.hook.pytest_xdist_make_scheduler.get_hookimpls()
    assert any(hook.plugin_name.endswith("tests/conftest.py") for hook in hooks)
