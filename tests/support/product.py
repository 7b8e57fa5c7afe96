"""The product's source files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "planner", "runtime")


def product_sources() -> dict[str, str]:
    """Text by dotted module name; a package's own file by the package's name."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    return {
        name.removesuffix(".__init__"): path.read_text()
        for name, path in zip(names, files, strict=True)
    }
