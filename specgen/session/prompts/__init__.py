"""Prompts: chat templates, control tokens in them, and texts with a gap."""

from specgen.session.prompts.chat import template_of
from specgen.session.prompts.prompt import Prompt, Prompts

__all__ = ["Prompt", "Prompts", "template_of"]
