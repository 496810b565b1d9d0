"""Loading of tokenizers with the checks that training needs, and construction of the demo's tokenizer."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybridengine.errors import DataError, raise_all
from hybridengine.files import read_object

PAD, UNKNOWN, TURN_START, TURN_END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names of the generic class, defined entirely by tokenizer.json, in transformers 5 and earlier."""

NUM_LISTED = 3
"""Number of tokens that a message about two tokenizers names."""

ROLES = ("system", "user", "assistant")
"""Roles with one token each, so that a short problem remains a short prompt."""
CHARACTERS = string.digits + string.ascii_lowercase + " \n+-*/=().,?!:"

CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{TURN_START}{{{{ message['role'] }}}}{{{{ message['content'] }}}}{TURN_END}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{TURN_START}assistant{{% endif %}}"
)
"""ChatML without line breaks, which would only lengthen the sequences."""


def load_tokenizer(folder: str | Path, pad_with_eos: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local folder; raise DataError listing missing tokens or a missing chat template.

    `pad_with_eos` pads with the end-of-sequence token if the folder defines no padding token. This is safe here, because
    sequence lengths determine the padding, but must be requested, because other programs read the token.
    """
    tokenizer = _read(Path(folder))
    if pad_with_eos and tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    check_tokenizer(tokenizer, str(folder))
    return tokenizer


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, folder: str | Path, own: str, other: str) -> None:
    """Raise DataError unless the tokenizer of `folder` has the same tokens with the same numbers.

    `own` and `other` are what a message calls the two. Special roles of tokens and chat templates may differ, and so may
    the vocabularies of models, which are padded.
    """
    known, found = (
        {number: token for token, number in one.get_vocab().items()}
        for one in (tokenizer, _read(Path(folder)))
    )
    wrong = sorted(number for number in {*known, *found} if known.get(number) != found.get(number))
    if not wrong:
        return
    listed = ", ".join(
        f"{number} is {found.get(number)!r}, not {known.get(number)!r}".replace("None", "missing")
        for number in wrong[:NUM_LISTED]
    )
    more = f", and {len(wrong) - NUM_LISTED} more" if len(wrong) > NUM_LISTED else ""
    raise DataError(
        f"{other} has another tokenizer ({len(found)} tokens) than {own} ({len(known)} tokens): {listed}{more}; name a"
        " model with the same tokenizer, whose files are in its folder"
    )


def _read(folder: Path) -> PreTrainedTokenizerBase:
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist; name a folder with tokenizer.json")
    try:
        # Explicitly False: otherwise transformers asks on the terminal whether to run code of the folder.
        return _loader(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a dozen types, among them bare Exception
        if "trust_remote_code" in str(error):
            raise DataError(
                f"the tokenizer of {folder} is code of its own, which is never run here; where you trust it, load it with"
                " transformers and save it as tokenizer.json, in a folder for model.tokenizer"
            ) from None
        raise DataError(
            f"{folder} holds no loadable tokenizer ({type(error).__name__}: {error});"
            " it needs tokenizer.json and tokenizer_config.json"
        ) from None


def _loader(folder: Path) -> type[AutoTokenizer] | type[PreTrainedTokenizerFast]:
    """Return AutoTokenizer, or the generic class if the folder names it, which AutoTokenizer replaces by the family's."""
    settings = folder / "tokenizer_config.json"
    named = read_object(settings).get("tokenizer_class") if settings.exists() else None
    return PreTrainedTokenizerFast if named in GENERIC_CLASSES else AutoTokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise one DataError that lists the features for training and generation that `tokenizer` lacks."""
    settings = f"tokenizer_config.json of {name}"
    problems = []
    if tokenizer.eos_token_id is None:
        problems.append(
            f"tokenizer {name} has eos_token=None, responses could not end; set eos_token in {settings}"
        )
    if tokenizer.pad_token_id is None:
        problems.append(
            f"tokenizer {name} has pad_token=None, batches are padded; set pad_token in {settings},"
            " or ask for pad_with_eos"
        )
    if not tokenizer.chat_template:
        problems.append(
            f"tokenizer {name} has no chat template, prompts are chat messages;"
            f" set chat_template in {settings}, add chat_template.jinja beside it, or name a file in model.chat_template"
        )
    raise_all(problems, DataError)


def token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """Return the number of the special token `name` ("eos", "pad"), whose presence `check_tokenizer` has verified."""
    number = getattr(tokenizer, f"{name}_token_id")
    assert isinstance(number, int), f"{name}_token_id={number!r}; load tokenizers with load_tokenizer"
    return number


def build_arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer, with one token per character, role and special token.

    It is a byte-level BPE without merges, so that the Qwen family's class, which AutoTokenizer selects next to a Qwen
    model, gives the same result. The 57 tokens, an odd number, are padded at every even tensor-parallel degree.
    """
    # The byte-level alphabet writes a space as Ġ and a line break as Ċ.
    characters = [{" ": "Ġ", "\n": "Ċ"}.get(character, character) for character in CHARACTERS]
    tokens = [PAD, UNKNOWN, TURN_START, TURN_END, *ROLES, *characters]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, UNKNOWN, TURN_START, TURN_END])
    tokenizer.add_tokens(list(ROLES))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
