# SPDX-License-Identifier: Apache-2.0
"""A rank that trains with --adaptra and the example's hook: leaves what the package has imported in OUTPUT, a folder.

    imported_ranks.py OUTPUT TRAINING_ARGUMENTS...

Counted is what the package's own import statements lead to from the modules that a process begins with; what only the
training job and emulation import is not.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "adaptra_megatron"
BEGINS_WITH = (f"{PACKAGE}.engine.bootstrap", f"{PACKAGE}.engine.enabling", f"{PACKAGE}.patches")
_stock_import = builtins.__import__
_imported: dict[str, set[str]] = defaultdict(set)
"""Names that each module of the package has imported."""


def _noted(name: str, *given: Any, **keywords: Any) -> Any:
    space = given[0] if given else keywords.get("globals")
    names = given[2] if len(given) > 2 else keywords.get("fromlist")
    importer = str((space or {}).get("__name__", ""))
    if importer.partition(".")[0] == PACKAGE:
        _imported[importer].update((name, *(f"{name}.{each}" for each in names or ())))
    return _stock_import(name, *given, **keywords)


def _imported_first(text: str) -> Iterator[str]:
    """Names that a module imports as it is imported itself: it may have been, before this process began."""
    left = list[ast.AST](ast.parse(text).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif (
            isinstance(node, ast.If)
            and "TYPE_CHECKING" not in ast.unparse(node.test)
            or isinstance(node, ast.Try | ast.With)
        ):
            left += ast.iter_child_nodes(node)


def files_by_module() -> dict[str, str]:
    """Return the file of each module of the package that was imported, as its own imports lead there."""
    found: dict[str, str] = {}
    left = [*BEGINS_WITH]
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        if name in found or name.partition(".")[0] != PACKAGE or module is None:
            continue
        file = Path(str(module.__file__))
        text = file.read_text() if file.suffix == ".py" else ""
        found[name] = str(file)
        left += [name.rpartition(".")[0], *_imported[name], *_imported_first(text)]
    return found


def main(output: Path, arguments: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    builtins.__import__ = _noted
    for name in BEGINS_WITH[:2]:  # patches come once Megatron can be imported on the CPU
        importlib.import_module(name)
    from testing.megatron.megatron_on_cpu import install

    install(with_fused_weight_gradient=True)
    from adaptra_megatron.patches import enable
    from slowest_action import SlowestAction

    from adaptra_megatron.config import AdaptraConfig
    from testing.training.process_groups import join_job, leave_job, set_up_groups
    from testing.training.train import Trainer
    from testing.training.training_arguments import check_arguments, parse_arguments

    args = parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *arguments])
    check_arguments(args, join_job(args))
    set_up_groups(args)
    applied = enable(AdaptraConfig(), hooks=[SlowestAction])
    Trainer(args, (), applied.runtime).run()
    applied.undo()
    (output / f"{os.environ['RANK']}.json").write_text(json.dumps(files_by_module()))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
