"""Writes the generated parts of every page of `docs/`, and says which pages changed."""

from docs.generate import ROOT, generated

for page in sorted((ROOT / "docs").rglob("*.md")):
    before = page.read_text(encoding="utf-8")
    after = generated(before, page)
    if after != before:
        page.write_text(after, encoding="utf-8")
        print(page.relative_to(ROOT))
