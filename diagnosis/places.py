"""What a piece of code is for, by its file and its function: input pipeline, checkpoint, configuration."""

from __future__ import annotations

import re
from typing import Final

from diagnosis.signals import Frame

_DATA: Final = re.compile(
    r"torch/utils/data/|-packages/(?:datasets|torchdata|webdataset|streaming|torchvision/datasets|PIL|h5py|lmdb|pandas|"
    r"pyarrow|soundfile|librosa|decord|cv2)/|(?:^|/)(?:data|datasets?|dataloaders?|data_utils|preprocess\w*)/[^/]+\.py$"
    r"|(?:^|[/_])(?:data|dataset|dataloader|data_?loader|datamodule|collat\w+|tokeniz\w+|preprocess\w*|reader)s?"
    r"(?:_\w+)?\.py$",
    re.IGNORECASE,
)
_DATA_CALL: Final = re.compile(
    r"^(?:get_batch|collate\w*|_?load_data\w*|load_dataset|get_data\w*|build_data\w*|make_data\w*|prepare_data\w*|"
    r"create_data\w*|setup_data\w*|read_\w+|tokenize\w*|preprocess\w*|\w*dataset\w*|\w*dataloader\w*)$"
)
_CHECKPOINT: Final = re.compile(
    r"torch/serialization\.py|torch/distributed/checkpoint/|safetensors/|dist_checkpointing/|"
    r"(?:^|/)\w*(?:checkpoint|ckpt)\w*\.py$"
)
_CHECKPOINT_CALL: Final = re.compile(
    r"(?:load|restore|resume|save|read)_?\w*(?:checkpoint|ckpt|state|weights|model|pretrained)|from_pretrained|resume|"
    r"load_state_dict|restore"
)
_CONFIG: Final = re.compile(
    r"argparse\.py|-packages/(?:omegaconf|hydra|pydantic|click|absl/flags|jsonargparse|tyro|yaml|fire)/|"
    r"(?:^|/)\w*(?:arguments?|args|argparser|config\w*|options|hparams|settings|flags)\.py$",
    re.IGNORECASE,
)
_CONFIG_CALL: Final = re.compile(
    r"(?:parse|validate|check|load|get|read|build|verify|finalize|override)_?\w*(?:arg|config|cfg|option|param|hparam|"
    r"setting)|^__post_init__$|^_?validate\w*$|sanity_check|^_do_sanity|from_yaml|_config_"
)


def in_data(frames: tuple[Frame, ...]) -> bool:
    """It came through the input pipeline."""
    return any(_DATA.search(one.file) or _DATA_CALL.search(_bare(one)) for one in frames)


def in_checkpoint(frames: tuple[Frame, ...]) -> bool:
    """It came through code that loads or saves a checkpoint."""
    return any(_CHECKPOINT.search(one.file) or _CHECKPOINT_CALL.search(_bare(one)) for one in frames)


def in_config(frames: tuple[Frame, ...]) -> bool:
    """The innermost few frames read or check arguments and configuration."""
    return any(_CONFIG.search(one.file) or _CONFIG_CALL.search(_bare(one)) for one in frames[-4:])


def _bare(frame: Frame) -> str:
    return frame.function.rsplit(".", 1)[-1]
