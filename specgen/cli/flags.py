"""The options that commands share, each with its spellings and its help.

The readable form comes first, llama.cpp's spelling beside it. Defaults are not here: they
stand in `specgen.options`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specgen.options import CacheType, FlashAttention, Show

_MODELS = "Models"
_PROMPT = "Prompt"
_ANSWER = "Answer"
_SAMPLING = "Sampling (in llama.cpp's order: top-k, top-p, min-p, temperature)"
_DRAFTING = "Drafting"
_MACHINE = "Machine"
_OUTPUT = "Output"

# --- models

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "--model",
        "-m",
        metavar="FILE|NAME",
        help="The target: a GGUF file, or a name from `specgen models list`.",
        show_default="the default pair's",
        rich_help_panel=_MODELS,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "--model-draft",
        "-md",
        metavar="FILE|NAME|ngram|none",
        help="What drafts: a GGUF file or a name; `ngram` continues repetitions of the text so "
        "far; `none` decodes plainly.",
        show_default="the pair's, or ngram",
        rich_help_panel=_MODELS,
    ),
]
Pair = Annotated[
    str | None,
    typer.Option(
        "--pair",
        metavar="NAME",
        help="A target with its draft from `specgen models list`, fetched on first use.",
        show_default="the default pair, if no target is given",
        rich_help_panel=_MODELS,
    ),
]

# --- prompt

PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT", help="The prompt; - reads it from standard input.", show_default=False
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="The prompt, for those who are used to -p.",
        rich_help_panel=_PROMPT,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="Read the prompt from a file; a newline at its end is dropped.",
        rich_help_panel=_PROMPT,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Put the prompt into the model's own chat template, or take it as it is.",
        show_default="chat, if the model has a template",
        rich_help_panel=_PROMPT,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        "-sys",
        metavar="TEXT",
        help="A system message for the chat template.",
        rich_help_panel=_PROMPT,
    ),
]

# --- answer

MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        "--predict",
        "-n",
        min=-1,
        help="The most tokens to generate; -1 goes on until the text ends or the context is full.",
        rich_help_panel=_ANSWER,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        "--reverse-prompt",
        "-r",
        metavar="TEXT",
        help="End the answer before this text; may be given several times.",
        rich_help_panel=_ANSWER,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Never choose an end-of-text token.", rich_help_panel=_ANSWER
    ),
]

# --- sampling

Temperature = Annotated[
    float,
    typer.Option(
        "--temp",
        "--temperature",
        min=0.0,
        help="Temperature; 0 takes the most likely token each time.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        min=0,
        help="Keep the k most likely tokens; 0 keeps all.",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Keep the most likely tokens that together reach p; 1 keeps all.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0.0,
        max=1.0,
        help="Drop tokens less likely than p times the most likely one; 0 keeps all.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        "-s",
        min=-1,
        max=2**63 - 1,
        help="Seed of the random numbers; -1 picks one.",
        rich_help_panel=_SAMPLING,
    ),
]

# --- drafting

DraftMax = Annotated[
    int,
    typer.Option(
        "--draft-max",
        "--draft-n",
        min=0,
        max=128,
        help="The most tokens to draft a round; 0 decodes plainly.",
        rich_help_panel=_DRAFTING,
    ),
]
DraftMin = Annotated[
    int,
    typer.Option(
        "--draft-min",
        "--draft-n-min",
        min=0,
        help="Drafts shorter than this are not used. (Above temperature 0 every draft of a model "
        "is: it was drawn at random, and dropping it for what it says would bias the answer.)",
        rich_help_panel=_DRAFTING,
    ),
]
DraftPMin = Annotated[
    float,
    typer.Option(
        "--draft-p-min",
        min=0.0,
        max=1.0,
        help="Stop drafting where the draft's most likely token is less likely than this.",
        rich_help_panel=_DRAFTING,
    ),
]
NgramMin = Annotated[
    int,
    typer.Option(
        "--ngram-min",
        min=1,
        help="The shortest run of tokens that --draft ngram looks for.",
        rich_help_panel=_DRAFTING,
    ),
]
NgramMax = Annotated[
    int,
    typer.Option(
        "--ngram-max",
        min=1,
        max=64,
        help="The longest run of tokens that --draft ngram looks for.",
        rich_help_panel=_DRAFTING,
    ),
]

# --- machine

CtxSize = Annotated[
    int | None,
    typer.Option(
        "--ctx-size",
        "-c",
        min=0,
        help="Context size in tokens; 0 takes what the model was trained with.",
        show_default="what prompt and answer need",
        rich_help_panel=_MACHINE,
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        "-b",
        min=1,
        max=8192,
        help="Prompt tokens to decode at once.",
        rich_help_panel=_MACHINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        min=1,
        max=1024,
        help="Threads for decoding.",
        show_default="physical cores",
        rich_help_panel=_MACHINE,
    ),
]
ThreadsBatch = Annotated[
    int | None,
    typer.Option(
        "--threads-batch",
        "-tb",
        min=1,
        max=1024,
        help="Threads for batches: prompts and verification.",
        show_default="same as --threads",
        rich_help_panel=_MACHINE,
    ),
]
GpuLayers = Annotated[
    int,
    typer.Option(
        "--gpu-layers",
        "-ngl",
        min=-1,
        help="Layers of the target to keep on the GPU; -1 is all of them.",
        rich_help_panel=_MACHINE,
    ),
]
GpuLayersDraft = Annotated[
    int,
    typer.Option(
        "--gpu-layers-draft",
        "-ngld",
        min=-1,
        help="Layers of the draft to keep on the GPU; -1 is all of them.",
        rich_help_panel=_MACHINE,
    ),
]
FlashAttn = Annotated[
    FlashAttention,
    typer.Option("--flash-attn", "-fa", help="Flash attention.", rich_help_panel=_MACHINE),
]
CacheTypeK = Annotated[
    CacheType,
    typer.Option(
        "--cache-type-k", "-ctk", help="Type of the cached keys.", rich_help_panel=_MACHINE
    ),
]
CacheTypeV = Annotated[
    CacheType,
    typer.Option(
        "--cache-type-v", "-ctv", help="Type of the cached values.", rich_help_panel=_MACHINE
    ),
]

# --- output

ShowOption = Annotated[
    Show,
    typer.Option(
        "--show",
        help="On a terminal: colour the tokens, rejected ones going with the next round "
        "(accepted), colour them and keep the rejected ones (all), or plain text (none).",
        rich_help_panel=_OUTPUT,
    ),
]
Stats = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats",
        help="A summary on standard error after the answer.",
        show_default="stats, but not with --json or --quiet",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print events as JSON, one a line, in place of the answer.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Nothing on standard error but errors.",
        rich_help_panel=_OUTPUT,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="llama.cpp's own log and more detail, on standard error.",
        rich_help_panel=_OUTPUT,
    ),
]
