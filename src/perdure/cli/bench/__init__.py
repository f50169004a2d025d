"""`perdure bench`: how fast a model runs here, against another command or another report.

`workloads` says what is run, `measure` runs it, `peer` runs another command beside it, `report` keeps and shows the
numbers. `online` measures a server instead.
"""

from perdure.cli.bench.commands import bench

__all__ = ["bench"]
