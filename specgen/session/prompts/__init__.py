"""Prompts: chat templates, control tokens in them, and texts with a gap."""

from specgen.session.prompts.prompt import Prompt, Prompts, template_of

__all__ = ["Prompt", "Prompts", "template_of"]
