"""The site of these pages: `make docs`."""

import shutil
from pathlib import Path

project, author, copyright = "rl_vlm", "the authors of rl_vlm", "the authors of rl_vlm, Apache-2.0"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "rl_vlm"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["conf.py"]
html_copy_source = html_show_sourcelink = False


def _write_twins(app, error):
    """Each page as Markdown beside its HTML, and llms.txt, which lists them, for programs that read."""
    if error is None:
        lines = [f"# {project}", "", "> Reinforcement learning with vision-language models on Ray.", ""]
        for page in sorted(Path(app.srcdir).glob("*.md")):
            text = page.read_text(encoding="utf-8")
            shutil.copy(page, app.outdir)
            lines.append(f"- [{text.splitlines()[0].lstrip('# ')}]({page.name})")
        Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app):
    app.connect("build-finished", _write_twins)
