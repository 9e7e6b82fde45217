"""Loading a vision-language model and its processor from a folder, the hub's local cache, or the built-in tiny one."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError
from safetensors import SafetensorError, safe_open

from rl_vlm.chat import ChatCodec
from rl_vlm.files import did_you_mean
from rl_vlm.imports import replaced
from rl_vlm.models.families import FAMILIES, family_of
from rl_vlm.models.images import DEFAULT_PIXELS, PixelLimits, TextSide
from rl_vlm.models.modules import DType, Quantization, from_folder, text_model
from rl_vlm.registry import builtin_models, suggestion
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def resolve_model(name: str, seed: int = 0) -> Path:
    """The folder of a built-in model, a folder, or a hub name that was fetched before. Raises UserInputError."""
    if name in builtin_models():
        return Path(builtin_models()[name].folder(seed))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserInputError(f"The folder {folder} holds no config.json: give a Hugging Face model folder.")
        return folder
    path_like = name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    if not path_like and "/" not in name:
        raise UserInputError(
            f"There is no folder or built-in model {name}.{suggestion(name, builtin_models())} Built in are "
            f"{', '.join(builtin_models())}; a hub name has an owner, such as Qwen/Qwen3-VL-2B-Instruct."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        if not path_like:
            return Path(snapshot_download(name, local_files_only=True))
    if path_like or folder.parent.is_dir():
        raise UserInputError(f"There is no folder {folder}.{did_you_mean(folder, '*/')}")
    raise UserInputError(f"Model {name} is not on this machine: run `rl-vlm fetch {name}` once while online.")


def check_weights(name: str) -> Path:
    """The folder of a model. Raises UserInputError where weights, except in a dry run, are missing or damaged."""
    folder = resolve_model(name)
    files = list(folder.glob("*.safetensors"))
    if not files:
        raise UserInputError(f"The folder {folder} holds no weights (*.safetensors): fetch the whole model.")
    for file in files:
        try:
            safe_open(file, framework="numpy")  # reads the header
        except (OSError, SafetensorError) as error:
            raise UserInputError(f"The weights {file} cannot be read ({error}): fetch the model again.") from error
    return folder


def load_text_side(folder: Path, pixels: PixelLimits = DEFAULT_PIXELS) -> TextSide:
    """The chat codec and the image geometry of a model folder. `pixels` replaces the processor's own limits, in all
    processes of a run alike. Raises UserInputError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = _load_tokenizer(folder)
        template = _chat_template(folder, tokenizer)
        vocab_size = int(config.get("text_config", config)["vocab_size"])  # at the top of older folders
        images = family_of(str(config.get("model_type"))).layout(folder, config, pixels)
        placeholder = images.placeholder or str(tokenizer.convert_ids_to_tokens(images.image_token_id))
        return TextSide(ChatCodec(tokenizer, template, placeholder, images.around), images, vocab_size)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
        raise UserInputError(
            f"The text files of the model in {folder} cannot be read ({type(error).__name__}: {error}): fetch or copy "
            "it again."
        ) from error


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """As AutoTokenizer, which imports the model's code unless the family says that its tokenizer loads without."""
    import transformers

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise UserInputError(f"The folder {folder} holds no tokenizer (tokenizer.json): fetch the whole model.")
    settings = folder / "tokenizer_config.json"
    name = json.loads(settings.read_text()).get("tokenizer_class", "") if settings.is_file() else ""
    for known in {family.tokenizer for family in FAMILIES.values() if family.tokenizer}:
        if name.startswith(known):
            return getattr(transformers, known).from_pretrained(folder)  # type: ignore[no-any-return]
    return from_folder(transformers.AutoTokenizer, folder)  # type: ignore[no-any-return]


def _chat_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """The processor's template, else the tokenizer's. Raises UserInputError without either."""
    older = folder / "chat_template.json"
    if older.is_file() and not (folder / "chat_template.jinja").is_file():
        return str(json.loads(older.read_text(encoding="utf-8"))["chat_template"])
    if not isinstance(tokenizer.chat_template, str):
        raise UserInputError(f"{folder} has no chat template: is it the folder of an instruction-tuned model?")
    return tokenizer.chat_template


def load_model(
    folder: Path,
    dtype: DType = "float32",
    device: str = "cpu",
    quantization: Quantization = "none",
    *,
    layers_on_host: bool = False,
) -> PreTrainedModel:
    """The model with its weights, in evaluation mode and frozen.

    In host memory, weights of the files' own type are the mapped files, which processes of a machine share. nf4: the
    language model's linear weights as NF4 (QLoRA, arXiv 2305.14314), computed with in `dtype`. layers_on_host: the
    language model's layers stay there, for a strategy that takes its shards from them.
    """
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserInputError(f"Device {device} was asked for and torch sees no GPU here: set the device to cpu.")
    from transformers import AutoModelForImageTextToText

    disable_cudnn_attention(device)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    if quantization == "nf4":
        from transformers import BitsAndBytesConfig

        check_quantization(quantization)
        options["device_map"] = {"": device}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=options["dtype"],
            llm_int8_skip_modules=[r".*visual", "lm_head"],  # regular expressions; the name is for every bit width
        )
    model = from_folder(AutoModelForImageTextToText, folder, **options)
    model.requires_grad_(False)
    decoder = text_model(model)
    layers = decoder.layers
    if layers_on_host:
        decoder.layers = type(layers)()  # in their place, so that the order of parameters stays
    if quantization == "none":
        model.to(device)
    if layers_on_host:
        decoder.layers = layers
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it would compute in bfloat16 whatever `dtype` says
    return model.eval()  # type: ignore[no-any-return]


def disable_cudnn_attention(device: str) -> None:
    """On a GPU keep torch from cuDNN's attention, which plans anew, for tens of milliseconds, for each shape: nearly
    every micro-batch and decoding step has its own."""
    import torch

    if device.startswith("cuda"):
        torch.backends.cuda.enable_cudnn_sdp(False)


def check_quantization(name: str) -> None:
    """Raise UserInputError where the package that a quantization needs is not installed."""
    if name == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserInputError("serving.quantization nf4 needs the package bitsandbytes: pip install 'rl-vlm[nf4]'.")


def quiet_libraries() -> None:
    """Keep progress bars and warnings of transformers, tokenizers and bitsandbytes out of the output."""
    from transformers.utils import logging as transformers_logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is installed


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """`model.save_pretrained(folder)` without its messages."""
    from transformers import modeling_utils

    quiet_libraries()
    # It asks accelerate whether the model is wrapped, which imports DeepSpeed where that is installed.
    with replaced(modeling_utils, "unwrap_model", lambda plain, *_, **__: plain):
        model.save_pretrained(folder)
