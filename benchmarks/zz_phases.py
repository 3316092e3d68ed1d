import time, os, sys, torch, torch.distributed as dist, numpy as np
from support.links import Link
from support.ranks import run_ranks
from support.models import Mlp
import minidp
from minidp.sharded import step as S, returns as R


def go(cap, overlaps):
    os.environ["MINIDP_SHARED_MEMORY"] = "0"
    torch.manual_seed(0)
    net = Mlp(7, 1005, 64)
    m = minidp.DataParallel(net, bucket_cap_mb=cap)
    o = torch.optim.AdamW(net.parameters())
    m.sharded_step(o, overlap_param_gather=overlaps)
    T = []
    now = time.perf_counter
    rec = {}

    def wrap(cls, name, key):
        f = getattr(cls, name)

        def g(*a, **k):
            t = now()
            r = f(*a, **k)
            rec.setdefault(key, 0)
            rec[key] += now() - t
            return r

        setattr(cls, name, g)

    wrap(S.ShardedStep, "before", "before")
    wrap(S.ShardedStep, "after", "after")
    wrap(R.Returns, "start", "ret.start")
    wrap(R.Return, "finish", "ret.finish")
    rows = []
    data = net.data(torch.Generator().manual_seed(0))
    for s in range(14):
        rec.clear()
        t0 = now()
        out = m(*data)
        t1 = now()
        out.backward()
        t2 = now()
        o.step()
        t3 = now()
        o.zero_grad()
        t4 = now()
        rows.append(
            [
                t1 - t0,
                t2 - t1,
                t3 - t2,
                rec.get("before", 0),
                rec.get("after", 0),
                rec.get("ret.start", 0),
                rec.get("ret.finish", 0),
                t4 - t0,
            ]
        )
    r = np.median(np.array(rows[4:]) * 1e3, axis=0)
    return (
        cap,
        overlaps,
        [len(b.params) for b in m._reducer.queue.buckets],
        dict(
            zip(
                "fwd bwd step before after ret.start ret.finish total".split(),
                r.round(1),
            )
        ),
    )


if __name__ == "__main__":
    for cap, ov in ((25, False), (25, True), (4, True), (8, True), (1e9, False)):
        print(run_ranks(go, 2, cap, ov, link=Link(1.0)), flush=True)
