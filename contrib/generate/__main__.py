"""Write the generated documents; name those that changed."""

from contrib.generate import ROOT, documents

for path, text in documents().items():
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))
