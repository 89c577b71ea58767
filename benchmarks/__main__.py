"""`python -m benchmarks NAME [OPTIONS]`: one benchmark, one JSON object as its last line."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys

import benchmarks


def main() -> int:
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name[0] != "_")
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: python -m benchmarks NAME [OPTIONS], with NAME one of {', '.join(names)}")
        return 2
    result = importlib.import_module(f"benchmarks.{sys.argv[1]}").run(sys.argv[2:])
    print(json.dumps({"benchmark": sys.argv[1], **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
