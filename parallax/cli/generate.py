"""`parallax generate`: see what a model has learned."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallax.checkpoint.find import tokenizer_of
from parallax.cli.text_stream import stream_text
from parallax.errors import ConfigError
from parallax.models.sampling import Sampling
from parallax.storage import Location

if TYPE_CHECKING:
    from parallax.data.chat.encoded import ChatEncoder
    from parallax.data.tokenizers import Tokenizer
    from parallax.models.decoder import DecoderStage

HELP = """Continue a text, or answer in a chat, with a model of Parallax or of Hugging Face.

    parallax generate runs/tiny --prompt "def add(a, b):"
    parallax generate ./SmolLM2-135M-Instruct --chat --prompt "Name three colours."
    parallax generate ./SmolLM2-135M-Instruct --chat              a conversation, until an empty line
    parallax generate runs/sft --messages chat.json --temperature 0.8 --top-p 0.95 --seed 3

What is generated goes to stdout as it comes; how much and how fast to stderr."""

CONTEXT_TOKENS = (
    6  # of the prompt that the first generated text is decoded with, for a space may depend on what is before it
)


def add_commands(groups: argparse._SubParsersAction) -> None:
    """Add the parser of this command."""
    parser = groups.add_parser(
        "generate",
        help="continue a text, or answer in a chat",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run's folder, a checkpoint, or a Hugging Face model's folder; or an address, as in s3://bucket/run",
    )
    parser.add_argument("text", nargs="*", help=argparse.SUPPRESS)  # a prompt without its option, to be told so
    parser.add_argument("--prompt", metavar="TEXT", help="what to continue, or with --chat what the user says")
    parser.add_argument("--chat", action="store_true", help="answer as the assistant; without --prompt a conversation")
    parser.add_argument("--system", metavar="TEXT", help="the system's message of a chat")
    parser.add_argument(
        "--messages",
        metavar="FILE",
        type=Path,
        help='a chat as JSON to answer: a list of messages, or {"messages": ...}',
    )
    parser.add_argument(
        "--template", metavar="NAME|FILE", help="chatml, llama3, plain or a file in Jinja (default: the model's)"
    )
    parser.add_argument("--tokenizer", metavar="PATH|bytes", help="(default: the model's)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=256, help="to generate at most (default: 256)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="0 takes the likeliest token (default: 0)"
    )
    parser.add_argument("--top-p", metavar="P", type=float, default=1.0, help="only the likeliest tokens of this share")
    parser.add_argument("--top-k", metavar="K", type=int, default=0, help="only the K likeliest tokens")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the choice among tokens (default: 0)")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="of the computation (default: fp32)"
    )
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    problems = sampling.check() + _problems(options)
    if problems:
        raise ConfigError(problems)
    chat = _read_chat(options)
    # What can be wrong without torch, whose import takes seconds, has been said by now.
    from parallax.checkpoint.find import find_model

    try:
        folder = find_model(options.model)
        speaker = _Speaker(folder, options, sampling, with_template=options.chat or chat is not None)
    except OSError as error:
        raise ConfigError(f"{options.model} cannot be read: {error}") from error
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        if chat is not None:
            speaker.answer(chat)
        elif options.chat:
            _converse(speaker, _system(options))
        else:
            speaker.say(speaker.text_ids(options.prompt))
    except KeyboardInterrupt:
        print()
        return 130
    return 0


def _problems(options: argparse.Namespace) -> list[str]:
    problems = []
    if options.text:
        problems.append(
            f"{' '.join(options.text)} stands alone; a text to continue is given as --prompt TEXT, in quotes"
        )
    if options.max_tokens < 1:
        problems.append(f"--max-tokens {options.max_tokens} must be at least 1")
    if options.messages is not None and (options.prompt is not None or options.system is not None):
        problems.append("--messages is a whole chat; leave out --prompt and --system, or put them into the file")
    elif options.messages is None and options.prompt is None and not options.chat and not options.text:
        problems.append("nothing to continue: give --prompt TEXT, --messages FILE, or --chat for a conversation")
    if options.system is not None and not options.chat and options.messages is None:
        problems.append("--system is of a chat; give --chat too")
    if options.template is not None and not options.chat and options.messages is None:
        problems.append("--template is of a chat; give --chat or --messages too")
    for name in ("prompt", "system"):
        text = getattr(options, name)
        if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
            problems.append(f"--{name} is no valid text: it is not UTF-8")
    return problems


def _system(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _read_chat(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the chat to answer as {"messages": ...}; None for a text, or a conversation that is yet to begin."""
    if options.messages is None:
        if not options.chat or options.prompt is None:
            return None
        return {"messages": [*_system(options), {"role": "user", "content": options.prompt}]}
    try:
        record = json.loads(options.messages.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(f"--messages {options.messages} is no valid JSON: it is nested too deeply") from None
    except OSError as error:
        raise ConfigError(f"--messages {options.messages} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--messages {options.messages} is no valid JSON: {error}") from None
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list) or not record["messages"]:
        raise ConfigError(f'--messages {options.messages} must hold a list of messages, or an object with "messages"')
    return record


def _converse(speaker: _Speaker, messages: list[dict[str, Any]]) -> None:
    """Answer line by line, until there is an empty one or no more."""
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not said.strip():
            return
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": speaker.answer({"messages": messages})})


class _Speaker:
    """A model with its tokenizer, and with a chat template if it is to chat; writes what it generates to stdout."""

    def __init__(self, folder: Location, options: argparse.Namespace, sampling: Sampling, with_template: bool) -> None:
        from parallax.data.tokenizers import load_tokenizer

        self.folder, self.sampling, self.max_tokens = folder, sampling, options.max_tokens
        self.given = tokenizer_of(options.tokenizer) or str(folder)
        self.encoder: ChatEncoder | None = None
        self.tokenizer: Tokenizer
        if with_template:
            from parallax.data.chat.encoder import load_chat_encoder

            self.tokenizer, self.encoder = load_chat_encoder(self.given, options.template)
            if self.encoder.notice:
                print(self.encoder.notice, file=sys.stderr)
        else:
            self.tokenizer = load_tokenizer(self.given)
        self.stops = [[token] for token in _end_ids(folder, self.tokenizer)]
        if self.encoder is not None:
            self.stops += filter(None, [_end_of_turn(self.encoder)])
        self.model = _open(folder, options.precision)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text to continue, begun as the tokenizer begins one; of no text, what stands between texts."""
        from parallax.data.tokenizer_source import find_tokenizer

        source = find_tokenizer(self.given)
        if source.kind == "huggingface":
            from tokenizers import Tokenizer as FastTokenizer

            fast = FastTokenizer.from_file(str(source.path))
            fast.no_truncation()
            fast.no_padding()
            ids = list(fast.encode(text).ids)
        else:
            ids = self.tokenizer.encode(text)
        between = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        return ids or ([] if between is None else [between])

    def answer(self, record: dict[str, Any]) -> str:
        """Answer a chat; return what was said."""
        from parallax.data.chat.records import BadChat, Chat, to_chat

        assert self.encoder is not None
        try:
            # A chat to be answered is one to be trained on but for its last turn.
            whole = to_chat(record | {"messages": [*record["messages"], {"role": "assistant", "content": "x"}]})
            chat = Chat(whole.messages[:-1], whole.weights[:-1], whole.tools)
            return self.say(self.encoder.prompt(chat))
        except BadChat as error:
            raise ConfigError(f"the chat cannot be answered: {error}") from None

    def say(self, prompt: list[int]) -> str:
        """Write the continuation of the ids; return it."""
        from parallax.models.generate import generate

        started, said = time.perf_counter(), ""
        generated: list[int] = []

        def tokens() -> Iterator[int]:
            for token in generate(
                self.model, prompt, max_tokens=self.max_tokens, sampling=self.sampling, stops=self.stops
            ):
                generated.append(token)
                yield token

        for text in stream_text(tokens(), prompt[-CONTEXT_TOKENS:], self.stops, self.tokenizer.decode):
            print(text, end="", flush=True)
            said += text
        print(flush=True)
        seconds = time.perf_counter() - started
        ended = next((stop for stop in self.stops if generated[-len(stop) :] == stop), None)
        limit = self.model.config.max_position_embeddings
        if ended is not None:
            why = f"ended by {''.join(map(self.tokenizer.token_name, ended))}"
        elif len(prompt) + len(generated) >= limit:
            why = f"cut at the model's {limit} positions"
        else:
            why = f"cut at --max-tokens {self.max_tokens}"
        speed = len(generated) / seconds
        read = "1 token" if len(prompt) == 1 else f"{len(prompt)} tokens"
        print(f"{read} read, {len(generated)} generated, {speed:.1f} a second; {why}", file=sys.stderr)
        return said


def _open(folder: Location, precision: str) -> DecoderStage:
    import torch

    from parallax.checkpoint.open_model import open_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return open_model(folder, device=device, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision])


def _end_ids(folder: Location, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a text: of generation_config.json, config.json and the tokenizer."""
    from parallax.models.hugging_face_config import read_fields

    found: list[Any] = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = read_fields(folder / name).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return sorted({token for token in found if type(token) is int})


def _end_of_turn(encoder: ChatEncoder) -> list[int]:
    """Return the ids that end a turn of the assistant: how two turns with other contents both end; [] if a template has none."""
    from parallax.data.chat.records import BadChat, Chat

    ends = []
    for content in ("one", "2."):
        messages = ({"role": "user", "content": "count"}, {"role": "assistant", "content": content})
        try:
            encoded = encoder.encode(Chat(messages, (1.0, 1.0)))
        except BadChat:  # such as of a template that wants a system's message
            return []
        turn = encoded.turns[-1]
        ends.append(encoded.input_ids[turn.start : turn.stop] if turn.ends else [])
    length = 0
    while length < min(map(len, ends)) and ends[0][-length - 1] == ends[1][-length - 1]:
        length += 1
    return ends[0][len(ends[0]) - length :]
