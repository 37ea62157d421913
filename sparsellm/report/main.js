// The page: its charts, the legend, and when to draw.

const { runs, lines: METRICS, heatmaps: LAYER_METRICS } = JSON.parse(
  document.getElementById("data").textContent,
);
runs.forEach((run, index) => Object.assign(run, { index }));
const state = { runs, visible: new Set(runs.map((run) => run.index)), printWidth: 0 };
const charts = [];

const percent = (share) => `${format(100 * share)}%`;
const TOKENS = { xLabel: "training tokens", xUnit: "tokens" };

const PREDICTED = {
  predicted_ffn_ms: ", FFNs as predicted",
  predicted_dense_ms: ", FFNs as predicted, all dense",
};

function lineChart(host, spec) {
  const options = { x: "linear", y: "linear", layer: "mean", ...spec.options };
  charts.push(new LineChart(document.getElementById(host), { ...spec, options }, state));
}

// A chart of one or more recorded lines; omitted if no run has them.
function overTokens(host, id, title, yLabel, names, spec = {}) {
  const lines = Object.entries(names);
  const least = spec.least || 1;
  if (!runs.some((run) => lines.some(([name]) => run.lines[name].x.length >= least))) return;
  const series = (run) =>
    lines.map(([name, suffix]) => ({
      run,
      name: run.label + suffix,
      markers: name === "validation" || name.startsWith("evaluation"),
      fine: name === "loss" || name.startsWith("predicted"),
      ...run.lines[name],
    }));
  lineChart(host, { id, title, yLabel, series, ...TOKENS, ...spec });
}

// The curve of the chosen layer, of the mean over layers, or of each of them, deeper ones fainter.
function byLayer(run, curves, choice) {
  const line = (layer, y) => ({ run, name: `${run.label}, layer ${layer}`, x: curves.x, y });
  if (choice === "mean") {
    return [
      {
        run,
        name: run.label,
        x: curves.x,
        y: curves.x.map((_, i) => mean(curves.layers.map((layer) => layer[i]))),
      },
    ];
  }
  if (choice === "every") {
    const fade = (layer) => 1 - (0.7 * layer) / Math.max(curves.layers.length - 1, 1);
    return curves.layers.map((y, layer) => ({ ...line(layer, y), opacity: fade(layer) }));
  }
  return curves.layers[choice] ? [line(choice, curves.layers[choice])] : [];
}

function addTrainingCharts() {
  for (const metric of METRICS) {
    const loss = metric.name === "loss";
    const share = metric.unit === "fraction";
    const times = metric.name === "step_ms";
    const predicted = times && runs.some((run) => run.lines.predicted_ffn_ms.x.length);
    overTokens(
      metric.section,
      metric.name,
      metric.title,
      metric.unit,
      {
        [metric.name]: "",
        ...(loss ? { validation: ", validation" } : {}),
        ...(predicted ? PREDICTED : {}),
      },
      {
        note: loss
          ? "Thin lines: training. Lines with dots: validation."
          : times
            ? predicted
              ? "Measured; thin lines: its FFNs as predicted, on the kernels that were chosen and all dense."
              : "Measured. No run has predicted times: only ffn.kernels auto on a GPU measures costs."
            : "",
        options: { y: metric.scale },
        yFromZero: metric.fromZero,
        ...(share ? { yFormat: percent } : {}),
      },
    );
  }
  const limited = runs.filter((run) => run.lines.evaluation_limited.x.length);
  overTokens(
    "evaluation",
    "evaluation",
    "Mean benchmark score over training",
    "mean score",
    { evaluation: "", evaluation_limited: ", first rows only" },
    {
      least: 2,
      yFormat: percent,
      note: limited.length
        ? `Only the first rows of each task, not a result to report: ${limited.map((run) => run.label).join(", ")}.`
        : "",
    },
  );
}

function addHeatmaps() {
  for (const metric of LAYER_METRICS) {
    // Records of older versions do not have every metric.
    if (!runs.every((run) => run.heat[metric.name].every((values) => values.length))) continue;
    const spec = {
      id: `${metric.name}-layers`,
      title: metric.title,
      unit: metric.unit,
      values: (run) => run.heat[metric.name],
      floor: metric.floor,
      ...(metric.unit === "fraction" ? { format: percent } : {}),
      options: { color: metric.scale },
    };
    charts.push(new HeatChart(document.getElementById(metric.section), spec, state));
  }
}

function addLastRecordCharts() {
  lineChart("now", {
    id: "position",
    title: "Non-zeros by position",
    note: "Means over stretches that double in length; a point is drawn at the first position of its stretch.",
    xLabel: "position in the sequence, from 1",
    xUnit: "(position)",
    yLabel: "non-zeros per token",
    yFromZero: true,
    series: (run, options) => byLayer(run, run.position, options.layer),
    layers: true,
    options: { x: "log", y: "log" },
  });
  const counts = {
    xLabel: "non-zeros of a token in a layer",
    xUnit: "non-zeros",
    xLogKind: "log1p",
  };
  lineChart("now", {
    ...counts,
    id: "distribution",
    title: "Distribution over tokens",
    note: "All layers together. On a log axis the lower edge means zero.",
    yLabel: "share of tokens per non-zero",
    yFormat: percent,
    series: (run) => ({
      run,
      name: run.label,
      step: true,
      x: run.distribution.x,
      y: [...run.distribution.density, 0],
    }),
    options: { x: "log1p", y: "log" },
  });
  lineChart("now", {
    ...counts,
    id: "tail",
    title: "Tail of the distribution",
    note: "Share of tokens with at least x non-zeros: the capacity that a packed format needs.",
    yLabel: "share of tokens with at least x",
    yFormat: percent,
    series: (run) => ({
      run,
      name: run.label,
      x: run.distribution.x,
      y: [...run.distribution.tail, 0],
    }),
    options: { x: "log1p", y: "log" },
  });
  addPopularity();
}

function addPopularity() {
  const windows = runs
    .filter((run) => run.popularity)
    .map(
      ({ label, popularity: { tokens, step } }) =>
        `${label}: ${tokens.toLocaleString("en")} tokens, step ${step}`,
    );
  const source = windows.length ? ` Newest checkpoint's window (${windows.join("; ")}).` : "";
  lineChart("now", {
    id: "popularity",
    title: "Popularity of the neurons",
    note: `Share of all activations that the most active neurons carry; dotted: all equally active.${source}`,
    xLabel: "most active neurons, share of the layer",
    xUnit: "of the neurons",
    xFormat: percent,
    yLabel: "share of all activations",
    yFormat: percent,
    yFromZero: true,
    xFromZero: true,
    series: (run, options) => (run.popularity ? byLayer(run, run.popularity, options.layer) : []),
    reference: (series) => ({ x: series[0].x, y: series[0].x }),
    layers: true,
    empty: "No checkpoint has counted neurons yet.",
    options: { x: "log", y: "linear" },
  });
}

function addLegend() {
  const legend = document.getElementById("legend");
  legend.hidden = runs.length === 1;
  for (const run of runs) {
    const button = html(
      "button",
      { type: "button", "aria-pressed": "true", "data-run": run.index },
      swatch(strokeOf(run.index)),
      run.label,
    );
    button.addEventListener("click", () => {
      if (!state.visible.delete(run.index)) state.visible.add(run.index);
      button.setAttribute("aria-pressed", String(state.visible.has(run.index)));
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

addTrainingCharts();
addHeatmaps();
addLastRecordCharts();
addLegend();
drawAll();
redrawOnResize();
