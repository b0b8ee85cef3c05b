// From runs to curves: means and bands over seeds, trailing averages, and when a target is first reached.

const MEGA = 1e6;
const ACROSS = { round: "round", megabytes: "MB sent and received, all clients together", seconds: "seconds" };
const ROUNDING = 1e-9;

/** How values of a measure are written, as in the tables of fedgg.report: 62.5 for a share, 0.341 for another number. */
const numberOf = (measure, value, digits = 1) =>
  !isNumber(value) ? NONE : measure.percent ? percent(value, digits) : significant(value);
const valueOf = (measure, value) => numberOf(measure, value) + (measure.percent && isNumber(value) ? " %" : "");
const bestWord = (measure) => (measure.higher ? "highest" : "lowest");

/** Mean and, where it is known, deviation or half the width of an interval. */
function withDeviation(measure, middle, deviation) {
  if (deviation == null) return numberOf(measure, middle);
  if (measure.percent) return `${percent(middle)} ± ${percent(deviation)}`;
  const matched = deviation && isPlain(deviation) && (middle === 0 || isPlain(middle));
  const written = matched
    ? fixed(middle, Math.min(decimals(deviation, 2), decimals(middle || 1, 6)))
    : significant(middle);
  return `${written} ± ${significant(deviation, 2)}`;
}

/** One number of a run at the rounds that have it: [{round, value, megabytes, seconds}]. */
function points(run, values) {
  let bytes = 0,
    seconds = 0;
  const curve = [];
  for (let at = 0; at < run.round.length; at++) {
    bytes += run.up[at] + run.down[at];
    seconds += run.seconds ? run.seconds[at] : 0;
    const value = values?.[at];
    if (isNumber(value)) curve.push({ round: run.round[at], value, megabytes: bytes / MEGA, seconds });
  }
  return curve;
}

/** Trailing averages of `window` values; the first `window - 1` points have none. */
function smoothed(curve, window) {
  if (window <= 1) return curve;
  return curve.slice(window - 1).map((point, at) => ({
    ...point,
    value: mean(curve.slice(at, at + window).map(({ value }) => value)),
  }));
}

/** Curves of several seeds as one, over the rounds that all have: a mean must not change because one ended earlier. */
function together(curves) {
  const full = curves.filter((curve) => curve.length);
  if (!full.length) return [];
  const maps = full.map((curve) => new Map(curve.map((point) => [point.round, point])));
  return full[0]
    .filter((point) => maps.every((map) => map.has(point.round)))
    .map(({ round }) => {
      const here = maps.map((map) => map.get(round));
      const values = here.map((point) => point.value);
      return {
        round,
        value: mean(values),
        low: Math.min(...values),
        high: Math.max(...values),
        seeds: values.length,
        megabytes: mean(here.map((point) => point.megabytes)),
        seconds: mean(here.map((point) => point.seconds)),
      };
    });
}

/** Whether a run has all its rounds, or all that its privacy budget or early stopping allows. */
function isComplete(run) {
  return ["finished", "spent", "stopped_early"].includes(run.status);
}

/** The status of a run that is neither complete nor diverged. */
function unendedWords(run) {
  return run.status === "damaged" ? "damaged, excluded from the averages" : "unfinished";
}

/** For each label: one curve over its finished seeds, and the single curves of unfinished and damaged ones. */
function linesOf(group, values, window = 1) {
  return group.labels.map((label, position) => {
    const runs = group.runs.filter((run) => run.label === label && run.status !== "diverged");
    const curve = (run) => smoothed(points(run, values(run)), window);
    const ended = runs.filter(isComplete).map(curve);
    const open = runs.filter((run) => !isComplete(run));
    return {
      label,
      position,
      main: together(ended),
      open: open.map((run) => ({ curve: curve(run), words: unendedWords(run) })),
    };
  });
}

/** The reference's final value with each seed, smoothed like everything else. */
function referenceFinals(group, key, window) {
  const ended = group.runs.filter((run) => run.label === group.reference && isComplete(run));
  const finals = ended.map((run) => [run.seed, smoothed(points(run, run[key]), window).at(-1)?.value]);
  return new Map(finals.filter(([, value]) => isNumber(value)));
}

/**
 * When the runs of a label first reach the target: means over those that do, `reached` of `seeds`.
 *
 * A target is a number, the same for every seed, or null: the reference's final value with the same seed. This is the
 * rule of fedgg.analysis.compare, whose numbers for the default target are used.
 */
function reaches(group, label, key, target, window) {
  const row = group.results[key].rows.find((one) => one.label === label);
  const computed = { 1: row?.raw, [group.window]: row?.smoothed }[window];
  if (target === null && computed) return computed;
  return reachedInRuns(group, label, key, target, window);
}

/** Whether a value is at least as good as the target; numbers on the page have six digits. */
function isReached(measure, value, target) {
  const rounding = ROUNDING * Math.max(1, Math.abs(target));
  return measure.higher ? value >= target - rounding : value <= target + rounding;
}

function reachedInRuns(group, label, key, target, window) {
  const finals = target === null ? referenceFinals(group, key, window) : null;
  const goal = (run) => (finals ? finals.get(run.seed) : target);
  const runs = group.runs.filter(
    (run) => run.label === label && (isComplete(run) || run.status === "diverged") && isNumber(goal(run)),
  );
  const measure = group.measures.find((one) => one.key === key);
  const hits = runs
    .filter(isComplete)
    .map((run) => smoothed(points(run, run[key]), window).find(({ value }) => isReached(measure, value, goal(run))))
    .filter(Boolean);
  const over = (name) => (hits.length ? mean(hits.map((hit) => hit[name])) : null);
  return {
    reached: hits.length,
    seeds: runs.length,
    rounds: over("round"),
    megabytes: over("megabytes"),
    seconds: over("seconds"),
  };
}
