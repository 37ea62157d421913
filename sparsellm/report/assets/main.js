// The page: its charts, the legend, and when to draw.

const { runs, metrics, layerMetrics } = JSON.parse(document.getElementById("data").textContent);
runs.forEach((run, index) => Object.assign(run, { index }));
const state = { runs, visible: new Set(runs), printWidth: 0 };
const charts = [];

const TOKENS = { label: "training tokens", unit: "tokens" };
const writeOf = (unit) => (unit === "fraction" ? percent : format);
const addLines = (spec) => charts.push(new LineChart(spec, state));
// Of the run that has most of them.
const numPoints = (name) => Math.max(...runs.map((run) => run.lines[name].x.length));

// The value that a metric always had, in all runs; undefined where it changed.
function constant(name) {
  const values = new Set(runs.flatMap((run) => run.lines[name].y));
  return values.size === 1 ? [...values][0] : undefined;
}

function addMetrics() {
  const flat = [];
  for (const { section, name, title, unit, scale, from_zero } of metrics) {
    if (!numPoints(name)) continue; // no run recorded it
    if (numPoints(name) > 1 && constant(name) !== undefined) {
      flat.push(`${title} (${writeOf(unit)(constant(name))})`);
      continue;
    }
    const y = { label: unit, kind: scale, fromZero: from_zero, write: writeOf(unit) };
    addLines({ section, id: name, title, x: TOKENS, y, lines: { [name]: "" }, ...beside(name) });
  }
  if (flat.length) {
    const note = html("p", { class: "note" }, `Without a chart, since they never changed: ${flat.join(", ")}.`);
    document.getElementById("training").after(note);
  }
}

// The note on a metric's chart, and its lines if there are more than the metric itself.
function beside(name) {
  if (name === "loss") {
    return {
      note: "Thin lines: training. Lines with dots: validation.",
      lines: { loss: "", validation: ", validation" },
    };
  }
  if (name !== "step_ms") return {};
  if (!numPoints("predicted_ffn_ms")) {
    return {
      note: "Measured. No run has predicted times: only ffn.kernels auto on a GPU measures costs.",
    };
  }
  return {
    note: "Measured; thin lines: its FFNs as predicted, on the kernels that were chosen and all dense.",
    lines: {
      step_ms: "",
      predicted_ffn_ms: ", FFNs as predicted",
      predicted_dense_ms: ", FFNs as predicted, all dense",
    },
  };
}

function addScores() {
  const lines = { evaluation: "", evaluation_limited: ", first rows only" };
  if (!Object.keys(lines).some((name) => numPoints(name) > 1)) return;
  const limited = runs.filter((run) => run.lines.evaluation_limited.x.length);
  const labels = limited.map((run) => run.label).join(", ");
  addLines({
    section: "evaluation",
    id: "evaluation",
    title: "Mean benchmark score over training",
    note: labels && `Only the first rows of each task, not a result to report: ${labels}.`,
    x: TOKENS,
    y: { label: "mean score", write: percent },
    lines,
  });
}

function addHeatmaps() {
  for (const { section, name, title, unit, scale, floor } of layerMetrics) {
    // Records of older versions do not have every metric.
    if (!runs.every((run) => run.heat[name].every((values) => values.length))) continue;
    const id = `${name}-layers`;
    const spec = { section, id, title, unit, scale, floor, metric: name, write: writeOf(unit) };
    charts.push(new HeatChart(spec, state));
  }
}

function addLastRecord() {
  const section = "now";
  const counts = {
    label: "non-zeros of a token in a layer",
    unit: "non-zeros",
    kind: "log1p",
    log: "log1p",
  };
  const windows = runs
    .map(({ label, lines: { popularity } }) => ({ label, ...popularity }))
    .filter(({ tokens }) => tokens)
    .map(
      ({ label, tokens, step }) => `${label}: ${tokens.toLocaleString("en")} tokens, step ${step}`,
    );
  addLines({
    section,
    id: "position",
    title: "Non-zeros by position",
    note: "Means over stretches that double in length; a point is drawn at the first position of its stretch.",
    x: { label: "position in the sequence, from 1", unit: "(position)", kind: "log" },
    y: { label: "non-zeros per token", kind: "log", fromZero: true },
    lines: { position: "" },
    layers: true,
  });
  addLines({
    section,
    id: "distribution",
    title: "Distribution over tokens",
    note: "All layers together. On a log axis the lower edge means zero.",
    x: counts,
    y: { label: "share of tokens per non-zero", kind: "log", write: percent },
    lines: { distribution: "" },
  });
  addLines({
    section,
    id: "tail",
    title: "Tail of the distribution",
    note: "Share of tokens with at least x non-zeros: the capacity that a packed format needs.",
    x: counts,
    y: { label: "share of tokens with at least x", kind: "log", write: percent },
    lines: { tail: "" },
  });
  addLines({
    section,
    id: "popularity",
    title: "Popularity of the neurons",
    note:
      "Share of all activations that the most active neurons carry; dotted: all equally active." +
      (windows.length ? ` Newest checkpoint's window (${windows.join("; ")}).` : ""),
    empty: "No checkpoint has counted neurons yet.",
    x: {
      label: "most active neurons, share of the layer",
      unit: "of the neurons",
      kind: "log",
      write: percent,
    },
    y: { label: "share of all activations", fromZero: true, write: percent },
    lines: { popularity: "" },
    layers: true,
    diagonal: true,
  });
}

function addLegend() {
  const legend = document.getElementById("legend");
  legend.hidden = runs.length === 1;
  for (const run of runs) {
    const sample = swatch(strokeOf(run.index));
    const button = html("button", { type: "button", "aria-pressed": "true" }, sample, run.label);
    button.addEventListener("click", () => {
      if (!state.visible.delete(run)) state.visible.add(run);
      button.setAttribute("aria-pressed", String(state.visible.has(run)));
      drawAll();
    });
    legend.append(button);
  }
}

const drawAll = () => charts.forEach((chart) => chart.draw());

function redrawOnResize() {
  let width = document.documentElement.clientWidth;
  let waiting = 0;
  window.addEventListener("resize", () => {
    // A phone's address bar changes only the height.
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(drawAll);
  });
  // Half of a page, in two columns, so that text keeps its size in print.
  const print = (printWidth) => () => {
    state.printWidth = printWidth;
    drawAll();
  };
  window.addEventListener("beforeprint", print(330));
  window.addEventListener("afterprint", print(0));
}

addMetrics();
addScores();
addHeatmaps();
addLastRecord();
addLegend();
drawAll();
redrawOnResize();
