"""Options of llama.cpp's programs that are typed out of habit.

An option for what specgen does by default is ignored, with a note. One that has an equivalent is
replaced with it. Others are refused, with a hint at what to use instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from specgen.errors import UsageError
from specgen.system.files import named_path

#: Options for what specgen does by default: those of all commands (""), and those of some. They
#: take no values, except --color.
_IGNORED_OPTIONS = {
    "": "--jinja --color -co --no-display-prompt --warmup --no-warmup --mmap --no-context-shift "
    "--no-escape --log-disable --no-perf --no-show-timings --repack --kv-offload -kvo --op-offload "
    "--no-mmproj --no-mmproj-auto --cont-batching -cb --cache-prompt --no-log-prefix "
    "--no-log-timestamps --no-log-jsonl --spec-default --prefill-assistant",
    "run": "--single-turn -st",
    "chat": "--conversation -cnv --interactive -i --interactive-first -if --multiline-input -mli",
    "serve": "--metrics --props --slots --webui --ui --no-agent -no-ag --embedding --embeddings",
}
#: llama.cpp's options, by our equivalents. The value that follows stays.
_NAMES_BY_EQUIVALENT = {
    "--system": "--system-prompt",
    "--gpu-layers": "--n-gpu-layers",
    "--gpu-layers-draft": "--n-gpu-layers-draft --spec-draft-ngl",
    "--draft": "--spec-draft-model",
    "--draft-max": "--spec-draft-n-max",
    "--draft-min": "--spec-draft-n-min --draft-n-min",
    "--draft-p-min": "--spec-draft-p-min",
    "--draft mtp": "--mtp",
    "--raw": "--no-conversation -no-cnv",
    "--file": "--in-file",
    "--stats": "--perf --show-timings",
    "--show none": "--simple-io",
    "--verbose": "--log-verbose",
}
#: Our equivalent of each of these options, as words of a command line.
_EQUIVALENTS = {
    name: equivalent.split()
    for equivalent, names in _NAMES_BY_EQUIVALENT.items()
    for name in names.split()
}
#: Options that have no equivalent, and what to use instead.
_HINTS_BY_NAMES = {
    "-ub --ubatch-size": "-b N is how many prompt tokens are decoded at once",
    "-e --escape": r"write line breaks as the shell does: $'one\ntwo'",
    "-cnv --conversation -i --interactive -if --interactive-first -mli --multiline-input -ins "
    "--instruct -cml --chatml": (
        "`specgen chat` is a conversation; `specgen run` answers one prompt"
    ),
    "-p --prompt": (
        "`specgen run` answers a prompt; in `specgen chat`, --system TEXT is the system message"
    ),
    "-st --single-turn -no-cnv --no-conversation": "`specgen run` answers one prompt",
    "--display-prompt --verbose-prompt": "--json shows the prompt as the model sees it",
    "--no-mmap --mlock -lm --load-mode -lzm --lazy-mode": (
        "leave it out: --weights-memory sets how much of the model stays in memory"
    ),
    "--lora --lora-scaled --lora-init-without-apply": (
        "merge the adapter into the model, for example with llama-export-lora"
    ),
    "-mm --mmproj -mmu --mmproj-url --mmproj-auto --mmproj-offload --no-mmproj-offload -mmdev "
    "--mmproj-device --image --audio --video --image-min-tokens --image-max-tokens --media-path": (
        "specgen generates text from text only"
    ),
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv": (
        "specgen uses the values in the model file: change them there"
    ),
    "-dev --device --spec-draft-device -devd --device-draft -mg --main-gpu -sm --split-mode": (
        "a variable such as CUDA_VISIBLE_DEVICES chooses the GPUs"
    ),
    "--list-devices": "`specgen doctor` lists the devices",
    "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn --moe-cache-mib "
    "-fit --fit -fitt --fit-target -fitc --fit-ctx": "-ngl N is how many layers are on the GPU",
    "--spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-cpu-moe -cmoed "
    "--cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft": (
        "-ngld N is how many layers of the draft are on the GPU"
    ),
    "--check-tensors": "`specgen doctor -m FILE` checks that a model decodes",
    "-cl --cache-list": "`specgen models list` lists the models on this disk",
    "--completion-bash": "`specgen --install-completion` completes names and options",
    "-sysf --system-prompt-file": '--system "$(cat FILE)" takes it from a file',
    "-cd --ctx-size-draft": "leave it out: specgen sizes the draft's context itself",
    "-td --threads-draft -tbd --threads-batch-draft --spec-draft-threads "
    "--spec-draft-threads-batch -ctkd --cache-type-k-draft --spec-draft-type-k -ctvd "
    "--cache-type-v-draft --spec-draft-type-v": "-t, -tb, -ctk and -ctv are for the draft, too",
    "-C -Cr --cpu-mask --cpu-range --cpu-strict --prio --poll -Cb -Crb --cpu-mask-batch "
    "--cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -Cd -Crd -Cbd "
    "--cpu-mask-draft --cpu-range-draft --cpu-strict-draft --prio-draft --poll-draft --numa": (
        "specgen has only -t; taskset and numactl choose cores, and nice sets the priority"
    ),
    "--no-jinja": "--chat-template replaces the model's own template; --raw uses none",
    "--log-file -lv --verbosity --log-verbosity --log-colors --log-prefix --log-timestamps "
    "--log-jsonl": "-v and -vv print more on standard error; `2> FILE` keeps it",
    "--keep --context-shift": "an answer ends where the context is full: -c N makes it larger",
    "--spec-type": "--draft chooses the kind of draft: a model, mtp, ngram or heads",
    "--spec-draft-p-split --draft-p-split": "--tree sets how drafts branch",
    "--spec-draft-sampling": "--verifier decides how drafts are sampled and judged",
    "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match "
    "--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-map-k-size-n "
    "--spec-ngram-map-k-size-m --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m "
    "--spec-ngram-size-n --spec-ngram-size-m": (
        "--ngram-min and --ngram-max limit the n-grams, and --draft-max the draft"
    ),
    "-lcd --lookup-cache-dynamic": "--lookup-store keeps texts to draft from",
    "--mirostat --mirostat-lr --mirostat-ent --adaptive-target --adaptive-decay": (
        "use another sampler, such as --min-p or --top-p"
    ),
    "-bs --backend-sampling --spec-draft-backend-sampling --no-spec-draft-backend-sampling": (
        "leave it out: specgen's own samplers choose the tokens"
    ),
    "-rea --reasoning --reasoning-effort --reasoning-budget": (
        '--chat-template-kwargs sets variables of the template, as {"enable_thinking": false}'
    ),
    "--reasoning-format": "a request to the server may have the field reasoning_format",
    "--in-prefix --in-suffix --in-prefix-bos": "--raw takes the prompt as you write it",
    "-o --output --output-file": "`> FILE` keeps the answer",
    "-np --parallel": "`specgen batch` and `specgen serve` generate several answers at once",
    "--host --port -a --alias --api-key-file --metrics --props --slots --ui --webui --embedding "
    "--embeddings": "`specgen serve` is the server",
    "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step --swa-full -cram "
    "--cache-ram --cache-idle-slots --no-cache-idle-slots --cache-reuse -kvu --kv-unified -no-kvu "
    "--no-kv-unified --kv-unified-per-slot -sps --slot-prompt-similarity -dt --defrag-thold": (
        "leave it out: specgen manages its caches itself"
    ),
    "--no-cache-prompt": 'a request to the server may have "cache_prompt": false',
    "--slot-save-path": "--prefix-store all keeps computed prompts on disk",
    "--models-dir --models-preset --models-max --models-autoload --no-models-autoload": (
        "`specgen serve --models FILE` serves several models"
    ),
    "--cors-origins": "--cors-origin ORIGIN lets the pages of one origin use the server",
    "--rerank --reranking": "specgen has embeddings, but does not rerank",
    "--tools --mcp-servers-config --mcp-servers-json -ag --agent": (
        "specgen runs no tools: the client of the server does"
    ),
    "-mu --model-url -dr --docker-repo": "download it, or name it with -hf USER/REPO:QUANT",
    "--api-key": "--api-key-file FILE: other users of the machine can see options",
    "-to --timeout": "--limit-time SECONDS limits the time of an answer",
    "--ssl-key-file --ssl-cert-file": "put a proxy with TLS in front of it",
    "--path --api-prefix --reuse-port": "put a proxy in front of it",
    "--offline": "the variable HF_HUB_OFFLINE=1 does so",
    # Listed here so that -bf is not read as -b with the value "f".
    "-bf --binary-file --prompt-cache-all --prompt-cache-ro -nkvo --no-kv-offload --no-op-offload "
    "-ptc --print-token-count -sp --special -nocb --no-cont-batching -gan --grp-attn-n -gaw "
    "--grp-attn-w -nr --no-repack --no-host --control-vector --control-vector-scaled "
    "--control-vector-layer-range --pooling --embd-normalize --spm-infill --server-base --no-ui "
    "--no-webui --no-slots --reasoning-preserve --skip-chat-parsing --no-prefill-assistant": "",
}
#: The hint for each of these options; "" if there is none.
_HINTS = {name: hint for names, hint in _HINTS_BY_NAMES.items() for name in names.split()}
#: Our options by llama.cpp's that name a model on the hub. Ours take it as hf:USER/REPO:QUANT.
_HUB_MODELS = {
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "-m"),
    **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), "-md"),
}
#: Options that give the file of the target in its repository, or the user's token for the hub.
_HUB_DETAILS = {"-hff": "file", "--hf-file": "file", "-hft": "token", "--hf-token": "token"}


def translated(context: Any, arguments: Sequence[str]) -> list[str]:
    """Return a command line with llama.cpp's options replaced with specgen's.

    It prints a note on options that are ignored, and puts the token for the hub, if one is given,
    into the environment.

    Args:
        context: Typer's context of the command.
        arguments: The words after the command's name.

    Raises:
        UsageError: If an option of llama.cpp has no equivalent.
    """
    translation = _Translation(context, arguments)
    translation.run()
    is_quiet = "-q" in arguments or "--quiet" in arguments
    if translation.ignored and not is_quiet:
        names = ", ".join(dict.fromkeys(translation.ignored))
        print(f"note: {names}: ignored, specgen does this by default", file=sys.stderr)
    if translation.token is not None:
        os.environ["HF_TOKEN"] = translation.token
    if translation.hub_file is None:
        return translation.words
    return _with_hub_file(translation.words, translation.hub_file)


class _Translation:
    """A command line that is translated word by word."""

    def __init__(self, context: Any, arguments: Sequence[str]) -> None:
        self._command: str = context.command_path
        #: The options of the command, by all their spellings.
        self._own_options: dict[str, Any] = {}
        for option in context.command.params:
            for name in (*option.opts, *option.secondary_opts):
                self._own_options[name] = option
        of_command = _IGNORED_OPTIONS.get(context.command.name, "")
        self._ignored_options = {*_IGNORED_OPTIONS[""].split(), *of_command.split()}
        #: The words that are not translated yet.
        self._rest = list(arguments)
        #: The words of the translated command line.
        self.words: list[str] = []
        #: The options that were ignored.
        self.ignored: list[str] = []
        #: The file of --hf-file, in the target's repository.
        self.hub_file: str | None = None
        #: The token of --hf-token.
        self.token: str | None = None

    def run(self) -> None:
        """Translate the command line."""
        while self._rest:
            word = self._rest.pop(0)
            if word == "--":  # no options follow
                self.words += [word, *self._rest]
                return
            self._translate(word)

    def _translate(self, word: str) -> None:
        """Translate a word. If it is an option, its value may be the next word, or follow a "="."""
        name, equals_sign, value = word.partition("=")
        if name.startswith("--"):  # llama.cpp accepts --top_k, too
            name = name.replace("_", "-")
        if name in self._own_options:
            self.words.append(f"{name}{equals_sign}{value}")
            if self._own_options[name].param_type_name == "option" and not equals_sign:
                self._keep_value(name)
        elif _HUB_MODELS.get(name) in self._own_options or name in _HUB_DETAILS:
            if not equals_sign and self._rest:
                value = self._rest.pop(0)
            self._take_hub_option(name, value)
        elif name in self._ignored_options:
            self._ignore(name)
        elif name in _EQUIVALENTS and _EQUIVALENTS[name][0] in self._own_options:
            self.words += _EQUIVALENTS[name]
            if equals_sign:
                self.words.append(value)
        elif name in _HINTS or name in _EQUIVALENTS:
            hint = _HINTS.get(name) or f"`{self._command} --help-all` has all options"
            raise UsageError(
                f"{name} is an option of llama.cpp that `{self._command}` does not have", hint
            )
        else:
            self.words.append(word)

    def _keep_value(self, name: str) -> None:
        """Take the value of one of our options, even if it looks like an option itself."""
        option = self._own_options[name]
        if not self._rest or option.is_flag or option.count:
            return
        value = self._rest.pop(0)
        self.words.append(value)
        # In llama.cpp, --draft takes a number of tokens.
        if name == "--draft" and value.isdigit() and not named_path(value):
            hint = f"--draft-max {value} drafts {value} tokens at most"
            raise UsageError(f"--draft {value}: not a model", hint)

    def _take_hub_option(self, name: str, value: str) -> None:
        """Translate an option of `_HUB_MODELS`, or remember the value of one of `_HUB_DETAILS`."""
        from specgen.models.hub_names import parse_reference

        if name in _HUB_MODELS:
            self.words += [_HUB_MODELS[name], str(parse_reference(value))]
        elif _HUB_DETAILS[name] == "file":
            self.hub_file = value
        else:
            self.token = value

    def _ignore(self, name: str) -> None:
        """Drop an option, and the value of --color if it follows."""
        self.ignored.append(name)
        # Colours are the default, unless they are switched off.
        takes_value = name in ("--color", "-co")
        if takes_value and self._rest and self._rest[0] in ("on", "off", "auto"):
            value = self._rest.pop(0)
            if value == "off" and "--show" in self._own_options:
                self.words += ["--show", "none"]


def _with_hub_file(words: list[str], file: str) -> list[str]:
    """Replace the target, which is a repository on the hub, with a file in the repository.

    Raises:
        UsageError: If not exactly one target is on the hub.
    """
    target_indices = [
        index
        for index, word in enumerate(words)
        if word.startswith("hf:") and words[index - 1] == "-m"
    ]
    if len(target_indices) != 1:
        raise UsageError("--hf-file needs one --hf-repo", "name it with -hf USER/REPO")
    from specgen.models.hub_names import parse_reference

    (index,) = target_indices
    repository = words[index].split(":")[1]
    file_reference = str(parse_reference(f"{repository}/{file}"))
    return [*words[:index], file_reference, *words[index + 1 :]]
