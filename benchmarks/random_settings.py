"""An agent that never runs out of ideas: sets some of a kernel's TUNABLES at random. For long unattended runs.

Usage:
    python orchestrate.py --agent "tuner,command: python benchmarks/random_settings.py"

Reads:  kernel.py in the current directory
Writes: the same file; its hypothesis to stdout
"""

import ast
import random
import re
from pathlib import Path


def main() -> None:
    path = Path("kernel.py")
    source = path.read_text()
    literals = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                literals[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    knobs = {name: values for name, values in literals.get("TUNABLES", {}).items() if name in literals}
    others = {name: [v for v in values if v != literals[name]] for name, values in knobs.items()}
    names = [name for name, values in others.items() if values]
    chosen = random.sample(names, min(len(names), random.randint(1, 3)))
    changes = []
    for name in chosen:
        new = random.choice(others[name])
        source = re.sub(rf"(?m)^({name}\s*=\s*)[^#\n]*?(\s*(?:#.*)?)$", rf"\g<1>{new!r}\g<2>", source, count=1)
        changes.append(f"{name} {literals[name]} -> {new}")
    path.write_text(source)
    print(f"HYPOTHESIS: {', '.join(changes)}: chance has not been here yet")


if __name__ == "__main__":
    main()
