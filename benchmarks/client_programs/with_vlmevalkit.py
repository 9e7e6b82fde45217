from pathlib import Path

from cells import KEY, MODEL, URL, cell, png
from vlmeval.api import GPT4V, LMDeployAPI

Path("picture.png").write_bytes(png())
SEEN = {"type": "image", "value": "picture.png"}
ASKED = [SEEN, {"type": "text", "value": "How many?"}, SEEN]


@cell("GPT4V")
def _():
    told = GPT4V(model=MODEL, key=KEY, api_base=f"{URL}/chat/completions", img_size=-1, retry=1).generate(ASKED)
    assert told and "Failed" not in told


@cell("LMDeployAPI, which asks for 16384 tokens")
def _():
    told = LMDeployAPI(model=MODEL, key=KEY, api_base=f"{URL}/chat/completions", retry=1).generate(ASKED)
    assert told and "Failed" not in told
