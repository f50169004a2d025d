"""A plugin of pytest's: why a test failed is said when it fails, so that a run which is cut off has said it."""

from __future__ import annotations

import pytest


class AtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AtOnce(config))
