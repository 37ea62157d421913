// Scales, ticks and numbers. A scale maps values to 0…1 and names its ticks.

const TRANSFORMS = {
  linear: { to: (v) => v, from: (p) => p },
  log: { to: (v) => Math.log10(v), from: (p) => 10 ** p },
  // For counts: zero is shown, large values are as on a log scale.
  log1p: { to: (v) => Math.log10(1 + v), from: (p) => 10 ** p - 1 },
};

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return [low, high];
}

// `kind` is a key of TRANSFORMS; `fromZero` makes a linear scale begin at 0; `domain` fixes it.
function makeScale(kind, values, { fromZero = false, domain = null, pad = 0 } = {}) {
  let [low, high] = domain || extent(kind === "log" ? values.filter((v) => v > 0) : values);
  if (low > high)
    return kind === "log"
      ? makeScale("linear", values, { fromZero, pad })
      : makeScale("linear", [0, 1]);
  if (kind === "linear" && fromZero && !domain) low = Math.min(low, 0);
  if (low === high) [low, high] = widened(kind, low, fromZero);
  const { to, from } = TRANSFORMS[kind];
  let [begin, end] = [to(low), to(high)];
  const margin = domain ? 0 : (end - begin) * pad;
  end += margin;
  if (!(fromZero && kind !== "log")) begin -= margin;
  return {
    kind,
    low: from(begin),
    high: from(end),
    // Values that a log scale cannot show are drawn at its lower edge.
    at: (v) => (kind === "log" && v <= 0 ? 0 : (to(v) - begin) / (end - begin)),
    value: (share) => from(begin + share * (end - begin)),
    ticks: (count) => ticks(kind, from(begin), from(end), count),
  };
}

function widened(kind, value, fromZero) {
  if (kind === "log") return [value / 2, value * 2];
  if (value === 0) return [0, 1];
  if (fromZero) return value > 0 ? [0, value * 1.25] : [value * 1.25, 0];
  const margin = Math.abs(value) * 0.1;
  return [value - margin, value + margin];
}

function ticks(kind, low, high, count) {
  if (kind === "linear") return linearTicks(low, high, count);
  const least = kind === "log1p" ? Math.max(low, 1) : low;
  const inside = (steps) => steps.filter((v) => v >= least * 0.999 && v <= high * 1.001);
  let found = inside(decadeTicks(least, high, count));
  if (found.length < 2) found = inside(decadeTicks(least, high, Infinity));
  if (kind === "log1p") return low <= 0 ? [0, ...found] : found;
  return found.length > 1 ? found : linearTicks(low, high, count);
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

// 1, 2, 5 of each decade if they fit, or whole decades, or every second, third, …
function decadeTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const decades = Math.log10(high / low);
  const factors = decades * 3 <= count ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil(decades / count));
  const found = [];
  for (let power = first; power <= last; power++) {
    if (power % stride === 0)
      for (const factor of factors) found.push(Number(`${factor}e${power}`));
  }
  return found;
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

// Four digits, k/M/B/T from `thousands` on, exponents below a ten-thousandth.
function format(value, thousands = 1e4) {
  const size = Math.abs(value);
  if (size >= thousands) return COMPACT.format(value).replace("K", "k");
  if (size > 0 && size < 1e-4)
    return Number(value.toPrecision(3)).toExponential().replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

const percent = (share) => `${format(100 * share)}%`;

// The numbers of one axis: if one uses k, all do.
function tickTexts(values, write = format) {
  const thousands = extent(values)[1] >= 1e4 ? 1e3 : 1e4;
  return values.map((value) => write(value, thousands));
}

const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length;

// Index of the entry of a sorted list that is nearest to `target`.
function nearest(sorted, target) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= target) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[high] - target) < Math.abs(sorted[low] - target) ? high : low;
}
