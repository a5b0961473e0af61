"""The names under which the one model is served."""

from __future__ import annotations

from gateway.errors import ApiError, ErrorKind, shown


class ServedNames:
    """names: the default first."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def read(self, name: str | None) -> str:
        """The served name that a request means. Others are refused: nobody shall mix models' vectors.

        Raises:
            ApiError: MODEL_NOT_FOUND.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(self.names)
            message = f"model {shown(name)} is not served here; this server has {known}"
            raise ApiError(ErrorKind.MODEL_NOT_FOUND, message, param="model")
        return name
