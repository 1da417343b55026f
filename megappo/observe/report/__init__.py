"""`megappo report`: one self-contained HTML page about one or several runs. See docs/report.md."""

from megappo.observe.report.page import write_report

__all__ = ["write_report"]
