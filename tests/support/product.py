"""The product's source files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "planner", "runtime")


def product_sources() -> dict[str, str]:
    """Text by dotted module name; a package's own file by the package's name."""
    own = sorted((ROOT / "gnnplan").glob("*.py"))
    parts = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(path): path.read_text() for path in own + parts}


def module_name(path: Path) -> str:
    """Name by which a source file is imported."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"gnnplan.{name.removeprefix('gnnplan.')}".removesuffix(".__init__")
