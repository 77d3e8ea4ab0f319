"""`fdl test`: its counts, its exit status and the checkout that it finds."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from flodl.cli import testing
from flodl.cli.main import root
from flodl.cli.testing import Suite, Tally
from flodl.errors import FlodlError

PYTEST_REPORT = (
    '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"></testsuite></testsuites>'
)
CTEST_REPORT = '<testsuite name="(empty)" tests="7" failures="1" disabled="1" skipped="2"></testsuite>'


def checkout(folder: Path) -> Path:
    """A checkout with one test that passes, one that fails, one that is skipped, and one that says pass by its name."""
    (folder / "tests" / "unit").mkdir(parents=True)
    (folder / "tests" / "sim").mkdir()
    (folder / "tests" / "test_architecture.py").write_text("def test_one():\n    assert 1 + 1 == 2\n")
    (folder / "tests" / "unit" / "test_two.py").write_text(
        "import pytest\n"
        "def test_fails():\n    assert 1 == 2\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_passes(n):\n    assert n\n"
        "def test_skipped():\n    pytest.importorskip('a_module_that_is_nowhere')\n"
    )
    (folder / "pyproject.toml").write_text('[project]\nname = "flodl"\n[dependency-groups]\ntest = []\ndev = []\n')
    return folder


@pytest.mark.parametrize(
    ("text", "tally"), [(PYTEST_REPORT, Tally(4, 3, 3)), (CTEST_REPORT, Tally(3, 1, 3)), (None, Tally())]
)
def test_reports_of_pytest_and_ctest_are_counted(tmp_path: Path, text: str | None, tally: Tally) -> None:
    path = tmp_path / "report.xml"
    if text is not None:
        path.write_text(text)
    assert testing.read_junit(path) == tally


@pytest.mark.parametrize(
    ("tally", "line"),
    [(Tally(5), "5 passed, 0 failed"), (Tally(5, 1, 2), "5 passed, 1 failed, 2 skipped")],
)
def test_the_line_that_ci_reads(tally: Tally, line: str) -> None:
    assert str(tally) == line


def test_a_part_counts_what_pytest_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    part = testing.PARTS["unit"]
    assert part(Suite(checkout(tmp_path))) == Tally(3, 1, 1)
    assert part(Suite(tmp_path, ("-k", "passes"))) == Tally(2, 0, 0)
    assert "2 passed" in capfd.readouterr().out


def test_no_test_at_all_is_a_failure_unless_a_selection_was_asked_for(tmp_path: Path) -> None:
    (checkout(tmp_path) / "tests" / "e2e").mkdir()
    part = testing.PARTS["e2e"]
    assert part(Suite(tmp_path)) == testing.FAILURE
    assert part(Suite(tmp_path, ("-k", "anything"))) == Tally()


def test_a_check_counts_only_when_it_fails(tmp_path: Path) -> None:
    suite = Suite(tmp_path)
    assert suite.check("sh", "-c", "exit 0") == Tally()
    assert suite.check("sh", "-c", "exit 1") == testing.FAILURE


def test_the_exit_status_and_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"native": Tally(2), "lint": Tally(), "unit": Tally(3, 0, 1), "e2e": Tally(1)}
    monkeypatch.setattr(testing, "PARTS", {name: lambda _suite, name=name: results[name] for name in results})
    found = checkout(tmp_path)
    monkeypatch.setattr(testing, "find_checkout", lambda _package, _start: found)
    monkeypatch.setattr(testing, "install_groups", lambda _root: None)
    whole = CliRunner().invoke(root, ["test"])
    assert whole.exit_code == 0
    assert whole.output.splitlines()[-1] == "6 passed, 0 failed, 1 skipped"
    some = CliRunner().invoke(root, ["test", "--part", "e2e", "--part", "native"])
    assert some.output.splitlines()[-1] == "3 passed, 0 failed"
    results["lint"] = testing.FAILURE
    broken = CliRunner().invoke(root, ["test"])
    assert broken.exit_code == 1
    assert broken.output.splitlines()[-1] == "6 passed, 1 failed, 1 skipped"


def test_the_checkout_is_the_package_s_own_else_the_current_one(tmp_path: Path) -> None:
    own = checkout(tmp_path / "own")
    other = checkout(tmp_path / "other")
    installed = tmp_path / "lib" / "site-packages" / "flodl" / "cli" / "testing.py"
    assert testing.find_checkout(own / "src" / "flodl" / "cli" / "testing.py", other) == own
    assert testing.find_checkout(installed, other / "tests" / "unit") == other
    with pytest.raises(FlodlError, match=r"is not inside a checkout of flodl\n.*clone the repository"):
        testing.find_checkout(installed, tmp_path / "lib")


def test_requirements_that_are_absent_or_too_old_are_missing() -> None:
    met = ["pytest", "pytest>=9.2", "click>=8,<100"]
    unmet = ["pytest>=1000", "a-distribution-that-is-nowhere"]
    assert testing.missing_requirements([*met, *unmet]) == unmet
