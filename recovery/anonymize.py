"""Names taken out of text: one name has one pseudonym within an export, and nobody comes back without the salt.

Two passes. `learn` reads everything once: names of users and hosts that stand where such names stand (`user@host`,
`/home/NAME`, `HOSTNAME=`) are then known wherever they stand. `text` replaces, in one pass from left to right, what is
known and what looks like an address, a path, a host, an id or a secret. In doubt it replaces: a log that says less is a
smaller loss than a name. What it cannot know is a name that looks like any other word and never stands at such a place.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import unicodedata
from collections.abc import Iterator
from typing import Final, Literal

from diagnosis.signals import clean_text
from diagnosis.taxonomy import FailureClass

Kind = Literal["host", "user", "job", "path", "ip", "id", "email", "url"]
LEARNED_CHARS: Final = 3
"""Shorter names are replaced only where they stand as names."""
TEXT_LIMIT: Final = 2000

_COMMON: Final = frozenset(
    """
    a about account active address addresses after agent all an and any application as at available back bad batch
    be been before begin by cache call cannot checkpoint checkpoints child class client closed cluster code command
    config connect connected connection container could cpu cuda data dataset datasets default defined device did
    directory does done down dying end error exception exit failed failure false file files first folder for found
    from gone gpu group had handle has have help home host hostname id if image in info input instance interrupt is
    it job kernel kill killed last launcher library line list local localhost lost machine main master memory
    message missing mode model module name names nccl network new no node nodes none not null number of offline on
    online open or other out output own owner partition path peer pending pid port possible process program project
    python queue rank ranks ready refused remote request reset response result return root run running same script
    see sent server service session shared signal since slurm space srun started state status step still stopped
    storage store str system task test that the their them then this thread time timeout tmp to token torch torchrun
    train trainer training true type unexpectedly unknown unreachable up used user users using value wait waiting
    warning was were when where which while will with within without work worker workers world write you your
    """.split()
) | {one.value for one in FailureClass}
_PACKAGES: Final = (
    "torch|torchvision|torchaudio|transformers|accelerate|datasets|deepspeed|lightning|pytorch_lightning|numpy|triton|"
    "megatron|nemo|ray|jax|jaxlib|flax|maxtext|flash_attn|apex|xformers|peft|trl|tokenizers|safetensors|fsspec|pyarrow|"
    "wandb|aiohttp|urllib3|requests|s3fs|boto3|botocore|nvidia|bitsandbytes|tensorflow|keras|multiprocess|msgspec"
)
_PUBLIC_PATH: Final = re.compile(
    r"/dev/(?:shm|null|kmsg|nvidia\w{0,12}|infiniband)|/proc(?:/self)?|/tmp|/usr(?:/bin)?|/"
    r"|(?:\.\./|/pytorch/|/opt/pytorch/)?(?:torch/csrc|aten/src|c10)/[\w/.+-]{1,120}"
    r"|NET/(?:IB|Socket|Plugin|OFI)|Driver/library|status=\d{1,3}/[A-Z]{1,12}|tensorflow/core/[\w/.+-]{1,120}"
    r"|(?:misc|include|transport|graph|src/misc|src/transport)/\w{1,40}\.(?:cc|h)"
    r"|\d[\d.,]*[kKMGTB]*/\d[\d.,]*\w{0,3}|\w{1,12}/(?:s|sec|it|iter|step|gpu|rank|node|batch|sample|token|min|h)"
    r"|(?i:and/or|n/a|i/o|input/output|tcp/ip|client/server|read/write|true/false|on/off|yes/no|send/recv|ib/roce)"
)
_LIBRARY: Final = re.compile(
    rf"(.*?)((?:site|dist)-packages/(?:{_PACKAGES})(?:/[\w.+-]{{1,80}}){{0,12}}|lib/python3\.\d{{1,2}}/[a-z_/]{{1,60}}\.py)"
)
_EXTENSION: Final = re.compile(
    r"\.(?:py|sh|pt|pth|bin|json|jsonl|yaml|yml|toml|txt|log|out|err|so|cu|cpp|cc|h|hpp|safetensors|ckpt|distcp|metadata|"
    r"parquet|arrow|tar|npy|npz|idx|gz|zst|tmp|lock|sock)$"
)
_SCRIPTS: Final = re.compile(
    r"(?i)(?:pre|fine)?_?(?:train|tune|main|run|launch|model|data|utils|test|eval|setup)\w?\.py"
)

_TECHNICAL: Final = re.compile(
    r"(?:ranks?|local_rank|cuda|device|dev|s?xid|steps?|iter|iteration|epoch|layers?|blocks?|expert|head|stage|zero|tp|pp"
    r"|dp|cp|ep|line|code|signal|sig|errno|attempt|thread|stream|channel|ring|tree|nvlink|link|port|lane|bank|sm|gpc|tpc"
    r"|socket|core|cpu|numa|node_rank|python|py|cudnn|cu|nccl|rccl|torch|lib[\w.+]{1,24}|fp|bf|tf|int|uint|float|bfloat"
    r"|complex|utf|sha|md|iso|rfc|ipv|ib|eth|eno|ens|enp|bond|mlx|hfi|hsn|lo|nvme|dm|top|v|version|http|base|gcc|glibc"
    r"|(?:gl)?ibcxx|exp|grad|loss|bucket|chunk|shard|group|seq|phase|param|tensor|dim|arg|op|i)[-_:.]?\d+(?:[-_.]\w{1,12}){0,3}"
    r"|gpu[-_:]?\d|[habv]\d{2,3}s?|mi\d{3}\w?|gh200|gb200|l40s?|c10d?|x86_64|p2p|s3|h2d|d2h|e\dm\d|tf32|\d+\w{0,4}"
    r"|adam\w?|llama\d?|gpt\d|t5|resnet\d+|zip\d|bzip2|lz4|sqlite3|urllib3|boto3|h5py|i-\d{1,6}",
    re.IGNORECASE,
)
_HOST_LIKE: Final = re.compile(
    r"(?:[a-z][a-z0-9]*[-_.])*(?:node|nodes|host|gpu|dgx|hgx|worker|wrk|compute|comp|cn|gn|cnode|gnode|login|rack|srv"
    r"|server|nid|ip|vm|pod|instance|slurm|hpc|master|launcher|trainer|leaf|spine|switch|oss|nas|fs)[-_]?\d[\w.-]*"
    r"|[a-z][a-z0-9]*(?:-[a-z0-9]+)*-[a-z]{0,3}\d[\w.-]*|[cnrgx]\d{2,}(?:[a-z]\d+)*|[a-z]\d+(?:[a-z]\d+){1,6}",
    re.IGNORECASE,
)
_TLD: Final = (
    r"com|org|net|edu|gov|mil|io|ai|dev|cloud|local|internal|intern|lan|corp|intra|cluster|localdomain|private|home|arpa"
    r"|svc|hpc|de|fr|uk|nl|ch|eu|us|ca|jp|cn|kr|au|se|fi|dk|pl|es|cz|br|sg|tw|il|info|biz|tech|co"
)
_USER_IS: Final = r"(?:USER|LOGNAME|USERNAME|SUDO_USER|user|username|user_name|owner|login|account)\s?[=:]\s?['\"]?"
_HOST_IS: Final = (
    r"(?:HOSTNAME|HOST|MASTER_ADDR|SLURMD_NODENAME|SLURM_(?:JOB_)?NODELIST|NODELIST|(?:host|node|nodes|peer|server"
    r"|machine|addr|address|instance|endpoint)(?:_?(?:name|list|addr|ip))?)\s?[=:]\s?['\"]?"
)
_JOB_IS: Final = (
    r"(?:SLURM_JOB_(?:NAME|ID|PARTITION|ACCOUNT)|SLURM_JOBID|JOB_(?:NAME|ID)|WANDB_\w{2,12}|RUN_(?:NAME|ID)"
    r"|job[-_ ]?(?:name|id)|run[-_ ]?(?:name|id)|project|entity"
    r"|experiment|exp[-_]name|partition|reservation|bucket|queue|namespace|pod"
    r"|container|image|team|org(?:ani[sz]ation)?)\s?[=:]\s?['\"]?"
)
_NAME: Final = r"[A-Za-z_][\w.-]{0,80}"
_HOST: Final = r"[A-Za-z0-9][\w-]*(?:\.[\w-]+)*"
_LEARN: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("user", re.compile(rf"(?<![A-Za-z]){_USER_IS}({_NAME})")),
    ("user", re.compile(r"(?:/home|/Users|/u|/users|/scratch|/work)/([A-Za-z_][\w.-]{0,80})")),
    ("user", re.compile(r"~([A-Za-z_][\w-]{1,40})(?=/)")),
    ("user", re.compile(r"\b(?:for|by|of|as|su -|logname|invalid) user ['\"]?([A-Za-z_][\w.-]{1,40})")),
    ("user", re.compile(r"\buser ['\"]([A-Za-z_][\w.-]{1,40})['\"]")),
    ("user", re.compile(r"\b(?:uid|gid|groups)=\d+\(([A-Za-z_][\w.-]{1,40})\)")),
    ("user", re.compile(r"\b([A-Za-z_][\w.-]{1,40})\(uid[ =]\d+\)")),
    ("user", re.compile(r"\bsudo:\s+([A-Za-z_][\w.-]{1,40}) :")),
    ("user", re.compile(r"\bAccepted \w+ for ([A-Za-z_][\w.-]{1,40}) from")),
    ("user", re.compile(r"(?<![\w.])([A-Za-z_][\w.+-]{1,40})@[A-Za-z0-9]")),
    ("host", re.compile(rf"(?<![\w.])[A-Za-z_][\w.+-]{{1,40}}@({_HOST})")),
    ("host", re.compile(rf"(?<![A-Za-z]){_HOST_IS}({_HOST}(?:\[[\d,-]+\])?)")),
    ("host", re.compile(r"^\s*(?:\[[^\]]{0,40}\]:?\s*)?([A-Za-z0-9][\w.-]*):\d+:\d+ \[\d+\]", re.MULTILINE)),
    (
        "host",
        re.compile(
            r"^(?:[A-Z][a-z]{2}\s+\d+ [\d:]{8}|\d{4}-\d\d-\d\d[T ]\S+)\s+([A-Za-z][\w.-]*)\s+[\w./-]+(?:\[\d+\])?:",
            re.MULTILINE,
        ),
    ),
    (
        "host",
        re.compile(
            r"\b(?:srun|slurmstepd|mpirun|pdsh|salloc): (?:error|warning|info|fatal): ([A-Za-z][\w.-]*(?:,[\w.-]+)*):"
        ),
    ),
    ("host", re.compile(r"(?i)\bconnect(?:ed|ion)?(?:\(\))? to (?:host |\[|\()([a-z][\w-]*(?:\.[\w-]+)*)")),
    (
        "host",
        re.compile(
            r"(?i)\bnodes? ([a-z][\w.-]*(?:,[\w.-]+)*)[,:]? "
            r"(?=not respond|exited|unexpected|reboot|failed|is |was |has )"
        ),
    ),
    ("host", re.compile(r"(?i)\bon (?:node|host) ([a-z][\w.-]*)")),
    ("host", re.compile(r"\bLinux ([a-z][\w.-]*) \d+\.\d+")),
    ("user", re.compile(r"\b(?:UserId|GroupId|User|usr)\s?[=:]?\s?([A-Za-z_][\w.-]{1,40})\s?\((?:uid[ =:]?)?\d+\)")),
    ("user", re.compile(r"\buser_?id\s?[=:]\s?([A-Za-z_][\w.-]{1,40})")),
    (
        "user",
        re.compile(r"\b(?:[Uu]ser:?|login as|logged in as:?) ([A-Za-z_][\w.-]{2,40})(?=[),;]|\.?$| \()", re.MULTILINE),
    ),
    ("job", re.compile(r"\blogged in as:? [\w.-]+ \(([\w.-]+)\)")),
    (
        "job",
        re.compile(r"\b(?:JobId=\d+ .{0,120}? Name|JobName|Account|QOS|Reservation|Comment)=([A-Za-z0-9][\w./@+-]*)"),
    ),
    ("job", re.compile(r"\bStepId=(\d{3,12})\b")),
    ("job", re.compile(r"\bin namespace ['\"]?([a-z][\w-]*)")),
    (
        "job",
        re.compile(
            r"(?<!\S)--(?:job-)?(?:name|user|account|partition|project|qos|reservation|rdzv[_-]id|run[_-]name)[ =]"
            r"([A-Za-z0-9][\w./@+-]*)"
        ),
    ),
    ("job", re.compile(r"\*\*\* (?:JOB|STEP) (\d{3,12})")),
    ("host", re.compile(r"\*\*\* (?:JOB|STEP) [\d.+]+ ON ([A-Za-z][\w.-]*)")),
    ("host", re.compile(r"\b(?:ssh|ping|scp|rsh)\s+(?:-\S+\s+)*([A-Za-z][\w.-]*\w)")),
    (
        "host",
        re.compile(
            r"(?i)\b(?:host|hostname|node|nodes|peer|server|machine|nodelist|resolve|reach|contact)\s+"
            r"(?:name\s+)?['\"(]{0,2}([a-z][\w.-]*\d[\w-]*)"
        ),
    ),
    ("host", re.compile(r"(?i)\b(?:host|hostname|node|peer|server|machine) ['\"]([a-z0-9][\w.-]*)['\"]")),
    (
        "host",
        re.compile(r"(?i)\b(?:resolve|lookup|reach|contact)(?: host(?:name)?)?:? ['\"]?([a-z][\w-]*(?:\.[\w-]+)*)"),
    ),
    ("job", re.compile(rf"(?<![A-Za-z]){_JOB_IS}([A-Za-z0-9][\w./@+-]*)")),
    ("job", re.compile(r"(?i)\bjob(?:_?id)?[ =:#]{1,2}(\d{3,12})\b")),
    (
        "id",
        re.compile(
            r"(?i)\b(?:serial(?: ?number| no\.?)?|s/n|asset(?: tag)?|part number|board id|guid|account id)\s?[:=#]?\s*"
            r"([A-Za-z0-9][A-Za-z0-9-]{3,40}(?:[:.][0-9a-f]{4}){0,3})"
        ),
    ),
)
"""Where names stand. The group is the name."""
_FIND: Final = re.compile(
    "|".join(
        f"(?P<{name}>{pattern})"
        for name, pattern in (
            ("url", r"(?i:[a-z][a-z0-9+.-]{1,15}://[^\s'\"<>)\]},]{1,500}|arn:[\w-]*:[^\s'\",)]{1,300})"),
            ("email", r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+"),
            ("login", r"[A-Za-z_][\w.+-]{0,64}@[A-Za-z0-9][\w.-]{0,80}"),
            ("uuid", r"(?i:(?:MIG-|GPU-)*[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?:/\d+/\d+)?)"),
            ("device", r"(?:GPU|MIG)-[0-9a-f]{4}[\w-]*"),
            ("mac", r"(?i:(?<![\w:-])(?:[0-9a-f]{2}[:-]){5,19}[0-9a-f]{2}(?![\w:]))"),
            ("guid", r"(?i:(?<![\w:.-])(?:(?:[0-9a-f]{4}:){3}|(?:[0-9a-f]{4}\.){2})[0-9a-f]{4}(?![\w:]|\.\w))"),
            ("ip6", r"(?i:(?<![\w:.])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,8}(?:\.\d{1,3}){0,3}(?:%[\w.-]+)?(?![\w:]))"),
            ("ip4", r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d])"),
            ("encoded", r"[^\s'\"]{0,200}%(?:2[FfBb0]|40|3[AaDd]|5[Cc])[^\s'\"]{0,400}"),
            ("drive", r"[A-Za-z]:\\[^\s'\"]{1,300}|\\\\[\w.-]{1,80}\\[^\s'\"]{1,300}"),
            ("quoted", r"(?<=['\"])~?/[^'\"\n]{1,400}(?=['\"])"),
            ("path", r"(?:~[\w.-]{0,64}|[\w.@+=-]{1,120})?(?:/[^\s'\"`<>|:;,()\[\]{}]{1,255})+/?|~[A-Za-z_][\w-]+"),
            ("nodelist", r"[A-Za-z][\w.-]{0,60}\[\d+(?:[,-][\d,-]*)\](?:[\w.-]*)"),
            ("domain", rf"(?i:(?<![\w.-])(?:[a-z0-9_](?:[\w-]{{0,61}}\w)?\.){{1,6}}(?:{_TLD})(?![\w(-]|\.\w))"),
            ("hex", r"(?i:\b0x[0-9a-f]{6,64}\b|\b(?=\d{0,40}[a-f])(?=[a-f]{0,40}\d)[0-9a-f]{8,128}\b|\b[a-f]{16,}\b)"),
            ("digits", r"(?<![\d.])\d{9,40}(?![\d]|\.\d)"),
            ("word", r"\w[\w.-]*"),
        )
    )
)  # fmt: skip
_ESCAPES: Final = re.compile(r"\\(?:[nrt]|u00[0-9a-f]{2}|x[0-9a-f]{2}|/)", re.IGNORECASE)
_PARTS: Final = re.compile(r"[^\W_]+")
_IN_LIST: Final = re.compile(r"[^,]+")
_SEPARATED: Final = re.compile(r"([._-])")
PARTS_JOINED: Final = 6
"""Parts of a name with hyphens that is known: `a-b-c` within `a-b-c-resume`."""


class Anonymizer:
    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._known: dict[str, Kind] = {}
        self._odd: re.Pattern[str] | None = None
        self._odd_names: dict[str, Kind] = {}
        """Names with spaces and the like."""

    def pseudonym(self, kind: Kind, name: str) -> str:
        key = f"{kind}\0{name.lower()}".encode("utf-8", "surrogatepass")
        return f"{kind}-{hmac.new(self._salt, key, hashlib.sha256).hexdigest()[:12]}"

    # ----- what is a name -----

    def know(self, kind: Kind, name: str, *, sure: bool = False) -> None:
        """It is one wherever it stands, unless it is a common word; and one that only stood like a name must not be
        short or a technical term."""
        name = _plain(name).strip(" .-_\"'").lower()
        if kind == "host":
            name = name.partition(".")[0]
        short = len(name) < LEARNED_CHARS and not (kind == "host" and any(map(str.isdigit, name)))
        if len(name) < 2 or name in _COMMON or (not sure and (short or _TECHNICAL.fullmatch(name))):
            return
        if re.fullmatch(r"\w[\w.-]*", name):
            self._known.setdefault(name, kind)
        elif self._odd_names.setdefault(name, kind) == kind:
            ordered = sorted(self._odd_names, key=len, reverse=True)
            self._odd = re.compile("|".join(rf"(?<!\w){re.escape(one)}(?!\w)" for one in ordered), re.IGNORECASE)

    def learn(self, text: str) -> None:
        for kind, name, _, _ in _named(_plain(text)):
            self.know(kind, name)

    # ----- replacing -----

    def name(self, kind: Kind, name: str) -> str:
        """A field that is a name, whatever it looks like."""
        return self._host(_plain(name)) if kind == "host" else self.pseudonym(kind, _plain(name)) if name else ""

    def text(self, text: str) -> str:
        text, parts, done = _plain(text), [], 0
        for match in self._odd.finditer(text) if self._odd is not None else ():
            parts += [self._with_names(text[done : match.start()])]
            parts += [self.pseudonym(self._odd_names[match[0].lower()], match[0])]
            done = match.end()
        return "".join([*parts, self._with_names(text[done:])])

    def _with_names(self, text: str) -> str:
        parts, done = [], 0
        for kind, name, start, end in sorted(_named(text), key=lambda one: (one[2], -one[3])):
            if start >= done and name.lower() not in _COMMON:
                parts += [self._found(text[done:start]), self._at_its_place(kind, name)]
                done = end
        return "".join([*parts, self._found(text[done:])])

    def _at_its_place(self, kind: Kind, name: str) -> str:
        if any(mark in name for mark in "@/") or _is_address(name):
            return self._found(name)
        if kind != "host":
            return self.pseudonym(self._known.get(name.lower(), kind), name)
        return self._found(name) if _TECHNICAL.fullmatch(name) else self._host(name)

    def _found(self, text: str) -> str:
        return _FIND.sub(self._replaced, text)

    def _replaced(self, match: re.Match[str]) -> str:
        kind, text = match.lastgroup, match[0]
        if kind == "word":
            return self._word(text)
        if kind == "url":
            scheme, mark, rest = text.partition("://")
            return f"{scheme}{mark}{self.pseudonym('url', rest)}" if mark else self.pseudonym("url", text)
        if kind == "email":
            return self.pseudonym("email", text)
        if kind == "login":
            user, _, host = text.partition("@")
            return f"{self.pseudonym('user', user)}@{self._host(host)}"
        if kind in ("quoted", "path"):
            return self._path(text)
        if kind in ("drive", "encoded"):
            return self.pseudonym("path", text)
        if kind in ("ip4", "ip6"):
            return self._address(text)
        if kind in ("nodelist", "domain"):
            return self._host(text) if kind == "domain" or not _TECHNICAL.match(text.partition("[")[0] + "0") else text
        return self.pseudonym("id", text)

    def _word(self, text: str) -> str:
        word = text.rstrip(".-")
        tail, low = text[len(word) :], word.lower()
        if low in self._known:
            return self.pseudonym(self._known[low], low) + tail
        if not _TECHNICAL.fullmatch(low) and _HOST_LIKE.fullmatch(low):
            return self._host(low) + tail
        if (changed := self._within(word)) != word:
            return changed + tail
        if _EXTENSION.search(low) and low.count(".") == 1 and not _SCRIPTS.fullmatch(low):
            return self._path(word) + tail
        return text

    def _within(self, word: str) -> str:
        """With what is known of it replaced, the longest parts first."""
        parts, made, at = _SEPARATED.split(word), [], 0
        while at < len(parts):
            ends = range(min(len(parts), at + 2 * PARTS_JOINED), at, -1)
            end = next((one for one in ends if "".join(parts[at:one]).lower() in self._known), at + 1)
            name = "".join(parts[at:end])
            kind = self._known.get(name.lower())
            made.append(name if kind is None else self.pseudonym(kind, name))
            at = end
        return "".join(made)

    def _host(self, name: str) -> str:
        """`n7.cluster.example` is `n7`."""
        if _is_address(name):
            return self._address(name)
        return self.pseudonym("host", name.lower().strip(".-").partition(".")[0]) if name else ""

    def _address(self, text: str) -> str:
        try:
            found = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return text  # a PCI address, a time, a version
        return text if found.is_loopback or found.is_unspecified else self.pseudonym("ip", str(found))

    def _path(self, text: str) -> str:
        if _PUBLIC_PATH.fullmatch(text):
            return text
        library = _LIBRARY.fullmatch(text)
        if library is not None and not any(part in self._known for part in _PARTS.findall(library[2].lower())):
            return f"/{self.pseudonym('path', library[1])}/{library[2]}"
        ending = _EXTENSION.search(text)
        return (
            ("/" if text[0] in "/~" else "") + self.pseudonym("path", text) + (ending[0] if ending is not None else "")
        )


def _plain(text: str) -> str:
    """Without secrets, control characters, escapes in letters, and letters that only look like others."""
    known = unicodedata.normalize("NFKC", text[: 4 * TEXT_LIMIT])
    shown = "".join(one for one in known if unicodedata.category(one) not in ("Cf", "Co", "Cs"))
    return clean_text(_ESCAPES.sub(" ", clean_text(shown, TEXT_LIMIT)), TEXT_LIMIT)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _named(text: str) -> Iterator[tuple[Kind, str, int, int]]:
    """Names that stand where names stand: kind, name, where it begins and ends."""
    for kind, pattern in _LEARN:
        for match in pattern.finditer(text):
            names = _IN_LIST.finditer(match[1]) if "," in match[1] and "[" not in match[1] else (None,)
            for one in names:
                start, end = (0, len(match[1])) if one is None else one.span()
                yield kind, match[1][start:end], match.start(1) + start, match.start(1) + end
