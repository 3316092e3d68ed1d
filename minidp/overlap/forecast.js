// Predict other settings: a port of costmodel.py and forecast.py, with their
// names. tests/page compares the numbers of both.
"use strict";

const MIB = 2 ** 20;

// Returns seconds of a message of nbytes bytes on {latency_s, bytes_per_s}.
function secondsOf(network, nbytes) {
  return network.latency_s + nbytes / network.bytes_per_s;
}

// Predicts when each bucket is full, sent and done. backward: {ready_s, nbytes, kinds},
// by position in ready order, and end_s; groups: positions per bucket, in launch order.
function play(backward, groups, network) {
  let done = 0;
  const buckets = groups.map((group) => {
    const nbytes = group.reduce((sum, k) => sum + backward.nbytes[k], 0);
    const full = backward.ready_s[group.reduce((a, b) => Math.max(a, b))];
    const start = Math.max(full, done);
    done = start + secondsOf(network, nbytes);
    return { group, nbytes, full, start, done };
  });
  return { buckets, exposed_s: Math.max(backward.end_s, done) - backward.end_s };
}

// Fills buckets in ready order by torch's rule: closed when they reach limit bytes.
function cappedGroups(backward, limit) {
  const groups = [], open = new Map(); // kind -> {group, nbytes}, sorted by last use
  backward.nbytes.forEach((nbytes, k) => {
    const kind = backward.kinds[k] || 0;
    const one = open.get(kind) || { group: [], nbytes: 0 };
    open.delete(kind);
    one.group.push(k);
    one.nbytes += nbytes;
    if (one.nbytes >= limit) groups.push(one.group);
    else open.set(kind, one);
  });
  return [...groups, ...[...open.values()].map((one) => one.group)];
}

function groupsOf(model, cap) {
  return cap === null ? model.groups : cappedGroups(model.backward, Math.trunc(cap * MIB));
}

// Returns bytes that each rank of a ring sends, per byte of a bucket.
function bytesOnBus(ranks) {
  return (2 * (ranks - 1)) / ranks;
}

// Returns the network of a change {bus, latency, ranks}; null: as recorded. bus: bytes/s
// that a rank sends; latency: seconds of a bucket among the recorded number of ranks.
// A ring of n ranks passes on each message 2 (n - 1) times.
function networkOf(model, change) {
  const { bus, latency, ranks } = change;
  if (bus === null && latency === null && ranks === null) return model.network;
  const size = ranks === null ? model.ranks : ranks;
  const sent = bus === null ? model.network.bytes_per_s * bytesOnBus(model.ranks) : bus;
  const one = latency === null ? model.network.latency_s : latency;
  return {
    latency_s: (one * (size - 1)) / (model.ranks - 1),
    bytes_per_s: sent / bytesOnBus(size),
  };
}

// Predicts a step with a change {cap (MiB), bus, latency, ranks, half, balanced}. gain_s
// is negative if the step becomes longer. balanced: no rank is late, as in the advice.
function predict(model, change) {
  const groups = groupsOf(model, change.cap);
  const nbytes = model.backward.nbytes.map((n) => (change.half ? Math.floor(n / 2) : n));
  const schedule = play({ ...model.backward, nbytes }, groups, networkOf(model, change));
  const now = play(model.backward, model.groups, model.network).exposed_s;
  const balance_s = change.balanced ? model.balance_s : 0;
  const gain_s = Math.min(now - schedule.exposed_s + balance_s, model.exposed_s);
  const exposed_s = model.exposed_s - gain_s;
  return { schedule, gain_s, exposed_s, step_s: model.step_s - gain_s };
}

// Returns the best bucket cap for the other settings of a change, as Forecast.best_cap.
function bestCap(model, change) {
  const gains = model.caps.map((cap) => predict(model, { ...change, cap }).gain_s);
  const least = Math.max(...gains) - 0.01 * model.step_s;
  const cap = model.caps.filter((_, n) => gains[n] >= least).pop();
  const whole = model.backward.nbytes.reduce((sum, n) => sum + n, 0);
  const enough = model.caps.find((each) => each * MIB >= whole) || cap;
  return { cap: Math.min(cap, enough), gain_s: gains[model.caps.indexOf(cap)] };
}
