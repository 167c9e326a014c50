"""Reports over result folders: retention against dense, tokens and bytes, fidelity."""

from eval.report.compare import compare
from eval.report.write import write_report

__all__ = ["compare", "write_report"]
