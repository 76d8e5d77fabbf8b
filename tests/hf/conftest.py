from collections import Counter, defaultdict

import pytest


FAMILIES = {"LION, text": "LionText", "LION, images": "LionImage", "BERT": "Bert", "ViT": "ViT"}
OUTCOMES = ("passed", "skipped", "failed")  # from the least to the most telling


def pytest_configure(config):
    # The marks are those of Transformers' own set-up, which its source distribution does not hold.
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnknownMarkWarning")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
    """A table of the tests of each family.

    A test that every head skips in a subtest of its own counts as skipped here; pytest's last line calls it passed.
    """
    reports = [report for stats in terminalreporter.stats.values() for report in stats if hasattr(report, "outcome")]
    outcomes = {}
    for report in sorted(reports, key=lambda report: OUTCOMES.index(report.outcome)):
        outcomes[report.nodeid] = report.outcome
    terminalreporter.section("Transformers' own tests")
    terminalreporter.write_line(f"{'':14}{'configurations':>16}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
    for family, prefix in FAMILIES.items():
        terminalreporter.write_line(f"{family:14}" + _row(outcomes, prefix))


def _row(outcomes, prefix):
    counts = defaultdict(Counter)
    for nodeid, outcome in outcomes.items():
        _, case, _ = nodeid.split("::", 2)
        if case.startswith(prefix):
            counts[case][outcome] += 1
    total = sum(counts.values(), Counter())
    return f"{len(counts):16}" + "".join(f"{total[outcome]:10}" for outcome in OUTCOMES)
