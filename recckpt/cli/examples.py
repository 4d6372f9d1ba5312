"""What the help of each command shows as examples."""

from __future__ import annotations

EXAMPLES = {
    "ls": (
        "recckpt ls runs/clicks",
        "recckpt ls s3://models/clicks --json",
        "recckpt ls runs                          # a line for each run",
    ),
    "show": (
        "recckpt show runs/clicks                    # the newest checkpoint of an output dir",
        "recckpt show runs/clicks/latest~1 --files   # the one before, with its files",
    ),
    "head": (
        "recckpt head runs/clicks item -n 3",
        "recckpt head runs/clicks/ckpt_300 item --columns embedding",
    ),
    "get": ("recckpt get runs/clicks item 17 -42",),
    "verify": (
        "recckpt verify runs/clicks           # all checkpoints, every byte",
        "recckpt verify runs/clicks/latest --quick",
        "recckpt verify runs/clicks --absent ids.txt --table user",
    ),
    "history": (
        "recckpt history runs/clicks item 17 -42",
        "recckpt history s3://models/clicks item 17 --json",
    ),
    "first": (
        "recckpt first runs/clicks                                  # where a row or tensor is not finite",
        "recckpt first runs/clicks --where 'table=item norm>100'",
        "recckpt first runs/clicks --where 'tensor=top.* max>1e4'",
        "recckpt first runs/clicks --where 'id=17 count>=5'",
    ),
    "diff": (
        "recckpt diff runs/clicks/latest~1 runs/clicks/latest",
        "recckpt diff runs/clicks/ckpt_300 runs/other/ckpt_300 --tolerance 1e-6 --out diff.html",
    ),
    "report": (
        "recckpt report runs/clicks                     # writes report.html",
        "recckpt report s3://models/clicks --out clicks.html --quick",
        "recckpt report runs/clicks --quick --failures-per-day 1   # how often it would best save",
    ),
    "sql": (
        'recckpt sql runs/clicks "select count(*) from item"',
        'recckpt sql runs/clicks "select step, rows, bytes from checkpoints order by step" --csv',
    ),
    "watch": (
        "recckpt watch runs/clicks",
        "recckpt watch s3://models/clicks --once --json   # for programs",
        "recckpt watch s3://models --once                 # all runs there",
        "recckpt watch runs/clicks --near /dev/shm/recckpt",
    ),
    "salvage": ("recckpt salvage runs/clicks/ckpt_300 item --out item.arrow",),
    "consolidate": ("recckpt consolidate runs/clicks --out model.pt",),
    "repair": (
        "recckpt repair runs/clicks --dry-run --clean   # says what would be removed",
        "recckpt repair runs/clicks --clean",
    ),
    "compact": (
        "recckpt compact runs/clicks             # the trainer adopts it at its next save",
        "recckpt compact runs/clicks --adopt     # where no trainer runs",
        "recckpt compact runs/clicks latest~1 --out runs/whole",
    ),
    "mirror": (
        "recckpt mirror runs/clicks s3://backup/clicks --max-upload-rate 50MB",
        "recckpt mirror s3://models/clicks /local/clicks --keep 1 --follow   # a local copy to serve from",
    ),
    "near": (
        "recckpt near ls /dev/shm/recckpt",
        "recckpt near clear /dev/shm/recckpt     # such as on a host that was away while ids were forgotten",
    ),
    "forget": (
        "recckpt forget runs/clicks --table user --ids ids.txt --dry-run   # what it would write again",
        "recckpt forget runs/clicks --table user --ids ids.txt",
        "recckpt forget runs/clicks              # ends what was begun earlier",
    ),
    "plan": ("recckpt plan --model-names names.txt bank.json",),
    "import": (
        "recckpt import vectors.parquet runs/start --table item --ids item_id --embedding vector",
        "recckpt import model.safetensors runs/start --as-table item.weight --dry-run",
    ),
    "export": (
        "recckpt export runs/clicks vectors --to npy --table item",
        "recckpt export runs/clicks changed --to parquet --since latest~1",
        "recckpt export runs/clicks sheet --to csv --table item",
    ),
}
