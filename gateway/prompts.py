"""What goes before a text to tell the model its task: by the model's own name, a dialect's, or verbatim."""

from __future__ import annotations

from gateway.errors import shown
from gateway.inputs import Inputs, Texts, check_repeated, invalid
from rose.batch import EngineInfo

# What dialects call a task, and the names that model authors give the same one.
_QUERY = ("query", "search_query", "retrieval.query")
_DOCUMENT = ("document", "passage", "search_document", "retrieval.passage")
_TASKS = {
    "query": _QUERY,
    "search_query": _QUERY,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "search_document": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class Prompts:
    """The prompts of one model. default: what a text gets when its request says nothing."""

    def __init__(self, info: EngineInfo) -> None:
        self._prompts = info.prompts
        name = info.default_prompt_name
        self.default = "" if name is None else info.prompts[name]

    def choose(self, prompt: str | None, prompt_name: str | None, input_type: str | None) -> str:
        """The words for a request: its own `prompt`, else that of `prompt_name`, else of `input_type`.

        A task that the model's authors wrote no prompt for gets the default.

        Raises:
            ApiError: INVALID_VALUE, for a name or task that nobody knows.
        """
        if prompt is not None:
            return prompt
        if prompt_name is not None:
            return self._named(prompt_name)
        return self.default if input_type is None else self._task(input_type)

    def _named(self, name: str) -> str:
        if name not in self._prompts:
            known = ", ".join(self._prompts) or "none"
            raise invalid(f"prompt_name is {shown(name)}; this model has {known}", "prompt_name")
        return self._prompts[name]

    def _task(self, task: str) -> str:
        if task in self._prompts:
            return self._prompts[task]
        if task not in _TASKS:
            known = ", ".join(dict.fromkeys((*_TASKS, *self._prompts)))
            raise invalid(f"input_type is {shown(task)}; this server knows {known}", "input_type")
        return next((self._prompts[name] for name in _TASKS[task] if name in self._prompts), self.default)


def with_prompt(inputs: Inputs, prompt: str) -> Inputs:
    """`inputs` with `prompt` before each text. Token ids are used verbatim, without it.

    Raises:
        ApiError: INPUT_TOO_LONG.
    """
    if not prompt or not isinstance(inputs, Texts):
        return inputs
    check_repeated(len(prompt), len(inputs.texts), "prompt")
    texts = [prompt + text for text in inputs.texts]
    return Texts(texts, inputs.name, inputs.query_name, inputs.num_queries)
