"""The base class of all config classes: immutable, validated, and closed to unknown fields."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,  # JSON can represent neither
    )

    def replace(self, **fields: Any) -> Self:
        """Return a copy with these fields changed; unlike `model_copy`, the copy is validated."""
        return type(self).model_validate({**dict(self), **fields})
