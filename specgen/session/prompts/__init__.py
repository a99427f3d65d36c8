"""Prompts: rendering chat templates, tokenizing, and fill-in-the-middle."""

from specgen.session.prompts.chat import template_of
from specgen.session.prompts.prompt import Prompt, Prompts

__all__ = ["Prompt", "Prompts", "template_of"]
