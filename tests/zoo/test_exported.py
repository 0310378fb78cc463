"""A model that was imported into a run directory and exported again is the same to transformers.

tests/convert/test_formats.py does this for the weights of every sample, without the run directory between.
"""

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxformer.convert import SAMPLES
from jaxformer.exchange import export_run, import_run
from jaxformer.zoo.parity import make_batch


def answer(model) -> np.ndarray:
    ids, mask, targets = (torch.tensor(part) for part in make_batch())
    given = {"decoder_input_ids": targets} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **given)[0].numpy()


@pytest.mark.parametrize("name", ["mixtral", "bart", "bert classes"])
def test_an_imported_model_comes_back_bit_for_bit(name, pair_of, tmp_path):
    pair = pair_of(name)
    import_run(pair.directory, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "again")
    kind = getattr(transformers, SAMPLES[name].architecture)
    again, loading = kind.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(loading.values()), loading
    np.testing.assert_array_equal(answer(again.eval()), answer(pair.theirs))
    before, after = (load_file(path / "model.safetensors") for path in (pair.directory, tmp_path / "again"))
    assert set(before) == set(after)
    for tensor, value in before.items():
        np.testing.assert_array_equal(after[tensor], value, err_msg=tensor)
