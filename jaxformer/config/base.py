"""The base class of every config node: frozen, closed to unknown fields, validated."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # JSON has neither
    )

    def replace(self, **fields: Any) -> Self:
        """A copy with these fields changed, validated as a whole: how one config derives from another."""
        return type(self).model_validate({**dict(self), **fields})
