"""Check of the dashboard against the types that Grafana publishes.

    python -m contrib.grafana.check_types

Compares the dashboard, and options and settings of each panel, with npm's package of the types, by
TypeScript's compiler. Both are fetched into a temporary folder, which needs npm. The exit code is 1
where something differs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5")
_FILE = Path(__file__).parent / "dashboards" / "slurm-elastic.json"
_PANELS = "@grafana/schema/dist/types/raw/composable"
#: Types with the values of enums in place of their names, which JSON does not have.
_HEAD = """\
import type { Dashboard, Panel } from "@grafana/schema";
type Plain<T> = T extends string ? `${T}` : T extends boolean | number | undefined | null ? T
    : T extends (infer U)[] ? Plain<U>[] : { [K in keyof T]: Plain<T[K]> };
"""
_SETTINGS = {
    "compilerOptions": {
        "strict": True, "noEmit": True, "skipLibCheck": True, "target": "es2020",
        "module": "esnext", "moduleResolution": "node",
    },
    "files": ["dashboard.ts"],
}  # fmt: skip


def program(dashboard: dict[str, Any]) -> str:
    """Return a program in TypeScript that gives each part of a dashboard its type."""
    lines = [_HEAD, f"export const dashboard: Dashboard = {json.dumps(dashboard)};"]
    lines += [
        f'import type * as {kind} from "{_PANELS}/{kind}/panelcfg/x/types.gen";'
        for kind in sorted({panel["type"] for panel in dashboard["panels"]})
    ]
    for panel in dashboard["panels"]:
        kind, number = panel["type"], panel["id"]
        lines.append(f"export const panel{number}: Panel = {json.dumps(panel)};")
        options = json.dumps(panel["options"])
        lines.append(f"export const options{number}: Plain<Partial<{kind}.Options>> = {options};")
        if kind == "timeseries":
            custom = json.dumps(panel["fieldConfig"]["defaults"]["custom"])
            expected = f"Plain<Partial<{kind}.FieldConfig>>"
            lines.append(f"export const custom{number}: {expected} = {custom};")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Fetch the types, compile, and print what differs."""
    if not shutil.which("npm"):
        sys.exit("check_types: npm is not installed: apt-get install npm")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "dashboard.ts").write_text(program(json.loads(_FILE.read_text("utf-8"))), "utf-8")
        (folder / "tsconfig.json").write_text(json.dumps(_SETTINGS), "utf-8")
        fetch = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run([*fetch, *PACKAGES], cwd=folder, check=True, timeout=600)
        compiler = folder / "node_modules" / ".bin" / "tsc"
        compile_all = [compiler, "--project", "."]
        compiled = subprocess.run(compile_all, cwd=folder, check=False, timeout=600)
    code = compiled.returncode
    print("the types differ" if code else f"{_FILE.name} agrees with {PACKAGES[0]}")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
