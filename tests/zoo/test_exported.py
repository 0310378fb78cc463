"""A model that is imported into a run directory and exported again is identical in transformers.

tests/convert/test_formats.py does this for the weights of every sample, without a run directory.
"""

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxformer.convert import SAMPLES
from jaxformer.exchange import export_run, import_run
from jaxformer.zoo.parity import classifier_ids, make_batch


def outputs(model, config) -> np.ndarray:
    batch = make_batch()
    ids = batch.ids if config.pooler is None else classifier_ids(config, batch.ids, batch.mask)
    arrays = {"input_ids": ids, "attention_mask": batch.mask}
    if config.shape == "encoder-decoder" and config.pooler is None:
        arrays["decoder_input_ids"] = batch.targets
    with torch.no_grad():
        return model(**{name: torch.tensor(array) for name, array in arrays.items()})[0].numpy()


@pytest.mark.parametrize(
    "name", ["mixtral", "bart", "bert classes", "llama classes", "bart classes", "modernbert tags"]
)
def test_import_then_export_is_bit_identical(name, pair_of, tmp_path):
    pair = pair_of(name)
    import_run(pair.directory, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "exported")
    kind = getattr(transformers, SAMPLES[name].architecture)
    exported, loading = kind.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading.values()), loading
    assert exported.config.id2label == pair.theirs.config.id2label
    np.testing.assert_array_equal(outputs(exported.eval(), pair.config), outputs(pair.theirs, pair.config))
    before, after = (load_file(path / "model.safetensors") for path in (pair.directory, tmp_path / "exported"))
    assert set(before) == set(after)
    for tensor, value in before.items():
        np.testing.assert_array_equal(after[tensor], value, err_msg=tensor)
