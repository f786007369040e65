"""What a piece of code is for, by its file, its function and its text: input pipeline, checkpoint, configuration."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from diagnosis.signals import Frame, Frozen

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
    r"(?:parse|validate|check|load|get|read|build|verify|finalize|override)_?\w*(?:arg|config|cfg|option|hparam|"
    r"setting)|^__post_init__$|^_?validate\w*$|sanity_check|^_do_sanity|from_yaml|_config_"
)

_DATA_CODE: Final = re.compile(
    r"Image\.open|\bnp\.(?:load|fromfile|memmap|loadtxt)\(|read_(?:csv|parquet|json|table|pickle)\(|load_dataset\(|imread\(|"
    r"h5py\.File|collate|\b\w*(?:loader|dataset)\w*[\[(.]|\bin \w*(?:loader|dataset)\w*:"
)
_CHECKPOINT_CODE: Final = re.compile(
    r"load_state_dict\(|torch\.load\(|(?:ckpt|checkpoint|state_?dict|snapshot)\w*\[|load_checkpoint\(|load_weights\(|"
    r"from_pretrained\(|\.restore\("
)
_CONFIG_CODE: Final = re.compile(
    r"^assert \(?(?:self\.)?(?:args|cfg|config|opts?|hparams)\b|\b(?:cfg|config|args|opts?)\["
)


class Where(Frozen, frozen=True, kw_only=True):
    """Where an exception came from."""

    frames: tuple[Frame, ...]
    """Outermost first."""
    code: str = ""
    """The innermost line of the user's own code."""

    def near(self, count: int) -> Where:
        """The innermost frames only."""
        return msgspec.structs.replace(self, frames=self.frames[-count:])

    @property
    def file(self) -> str:
        """That of the innermost frame."""
        return self.frames[-1].file if self.frames else ""

    @property
    def in_data(self) -> bool:
        """It came through the input pipeline."""
        if _DATA_CODE.search(self.code) is not None or any(_DATA.search(one.file) for one in self.frames):
            return True
        # A loop over data calls the model: what it raises is not the data's.
        models = [number for number, one in enumerate(self.frames) if one.file.endswith("nn/modules/module.py")]
        return any(_DATA_CALL.search(_bare(one)) for one in self.frames[models[-1] + 1 if models else 0 :])

    @property
    def in_checkpoint(self) -> bool:
        """It came through code that loads or saves a checkpoint."""
        return _CHECKPOINT_CODE.search(self.code) is not None or _through(self.frames, _CHECKPOINT, _CHECKPOINT_CALL)

    @property
    def in_config(self) -> bool:
        """The innermost few frames read or check arguments and configuration."""
        return _CONFIG_CODE.search(self.code) is not None or _through(self.frames[-4:], _CONFIG, _CONFIG_CALL)


def _through(frames: tuple[Frame, ...], files: re.Pattern[str], functions: re.Pattern[str]) -> bool:
    return any(files.search(one.file) or functions.search(_bare(one)) for one in frames)


def _bare(frame: Frame) -> str:
    return frame.function.rsplit(".", 1)[-1]
