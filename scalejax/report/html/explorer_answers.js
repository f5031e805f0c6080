// Time, cost and memory of a setting, from the table of predictions that the page was given.
// No part of the page is needed: tests run this file alone as well.
const answers = (function () {
  "use strict";
  const HOUR = 3600, DAY = 86400;

  const COUNT = /^\s*((?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)(?:e[0-9]+)?)\s*([kmbgt]?)\s*$/;
  const SIZES = { "": 1, k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };

  // A number as typed, such as 300B, by the grammar of `parse_count` in core/units.py; null if it
  // is not one.
  function parseCount(text) {
    const found = COUNT.exec(text.toLowerCase());
    const value = found ? Number(found[1].replaceAll("_", "")) * SIZES[found[2]] : 0;
    return value > 0 && Number.isFinite(value) ? value : null;
  }

  // The layouts of a setting, or why it has none.
  function options(data, state) {
    const at = (list, value) => list.indexOf(value);
    const key = [
      data.clusters.findIndex((each) => each.name === state.cluster),
      at(data.devices, state.devices),
      at(data.batches, state.batch),
      at(data.dtypes, state.precision),
      at(data.networks, state.network),
      data.frameworks.findIndex((each) => each.name === state.framework),
    ].join();
    const cell = data.cells[key];
    if (cell === undefined) return { refused: "it is not in the table of this page", options: [] };
    if (typeof cell === "number") return { refused: data.refusals[cell], options: [] };
    return { options: cell.map((row) => option(data, row)) };
  }

  function option(data, row) {
    const [layout, step, p10, p90, mfu, fits, state, working, peak, goodput, origin, ...terms] = row;
    const waterfall = [];
    for (let i = 0; i < terms.length; i += 2)
      waterfall.push({ name: data.terms[terms[i]], seconds: terms[i + 1] });
    return { layout: data.layouts[layout].words, flags: data.layouts[layout].flags, step, p10, p90,
      mfu, fits: fits === 1, stateBytes: state, workingBytes: working, peakBytes: peak, goodput,
      origin: data.origins[origin], waterfall };
  }

  function updates(data, state) {
    return Math.max(1, Math.ceil(state.tokens / (state.batch * data.tokensPerSample)));
  }

  // Time and cost of a run with one layout; null if a rate is unknown.
  function bill(data, state, option) {
    const cluster = data.clusters.find((each) => each.name === state.cluster);
    const price = (state.prices || {})[cluster.name] ?? cluster.price;
    const count = updates(data, state), runs = (step) => count * step / (option.goodput ?? 1);
    const seconds = runs(option.step), deviceHours = seconds / HOUR * state.devices;
    const kwh = cluster.watts === null ? null
      : cluster.watts * (cluster.pue ?? 1) * deviceHours / 1000;
    return {
      ...option, cluster: cluster.name, devices: state.devices, updates: count, seconds, days: seconds / DAY,
      lowDays: option.p10 === null ? null : runs(option.p10) / DAY,
      highDays: option.p90 === null ? null : runs(option.p90) / DAY,
      deviceHours, price, dollars: price === null ? null : deviceHours * price,
      mwh: kwh === null ? null : kwh / 1000,
      kilograms: kwh === null || state.grid === null ? null : kwh * state.grid / 1000,
      tokensPerSecond: state.batch * data.tokensPerSample / option.step,
      memoryBytes: cluster.memoryBytes,
    };
  }

  // Layouts that can be chosen: if there are any, only those whose step is what `predict` prints.
  function offered(options) {
    const predicted = options.filter((each) => each.origin !== "closed_form");
    return predicted.length ? predicted : options;
  }

  // All layouts of a setting with their bills, and the chosen one: that of `state.layout` if it is
  // offered, else the fastest that fits, else the fastest.
  function answer(data, state) {
    const found = options(data, state);
    if (found.refused) return { refused: found.refused, options: [], chosen: null };
    const bills = found.options.map((each) => bill(data, state, each));
    const named = offered(bills).find((each) => each.layout === state.layout);
    return { options: bills, chosen: named || bills[0], isBest: !named || named === bills[0] };
  }

  // The best layout for each number of devices.
  function overDevices(data, state) {
    return data.devices.map((devices) => {
      const own = { ...state, devices };
      return { devices, ...answer(data, own) };
    });
  }

  // Where a curve through points (x, y), log-log linear between them, reaches `value`.
  function crossing(points, value) {
    for (let i = 1; i < points.length; i++) {
      const [a, b] = [points[i - 1], points[i]];
      if ((a.y - value) * (b.y - value) > 0 || a.y === b.y) continue;
      const share = Math.log(value / a.y) / Math.log(b.y / a.y);
      return Math.exp(Math.log(a.x) + share * Math.log(b.x / a.x));
    }
    return null;
  }

  // At what point another cluster, with its best layout, is as cheap or as fast as the chosen one.
  function breakEven(data, state, other) {
    const mine = answer(data, state).chosen;
    const theirs = { ...state, cluster: other, layout: null };
    const same = answer(data, theirs).chosen;
    const points = overDevices(data, theirs)
      .filter((each) => each.chosen && each.chosen.fits)
      .map((each) => ({ x: each.devices, y: each.chosen.days }));
    const both = mine && same;
    return {
      mine, same, ratio: both ? mine.deviceHours / same.deviceHours : null,
      price: both && mine.price !== null ? mine.price * mine.deviceHours / same.deviceHours : null,
      devices: mine ? crossing(points, mine.days) : null,
    };
  }

  // The shell command that predicts a chosen layout; all but the setting is quoted already.
  function command(data, state, chosen) {
    const cluster = data.clusters.find((each) => each.name === state.cluster);
    const own = cluster.networkRate, rate = own === null ? `${state.network}x` : own * state.network;
    const words = ["scalejax predict", data.run, "--cluster", cluster.path, "--devices", state.devices,
      "--framework", state.framework, `\\\n  --model.compute_dtype ${state.precision}`,
      `--batch.global_batch ${state.batch}`, chosen.flags, data.flags,
      own === null && state.network === 1 ? "" : `--network.bytes_per_second ${rate}`];
    return words.filter((each) => each !== "").join(" ");
  }

  return { answer, options, offered, updates, overDevices, breakEven, crossing, parseCount, command };
})();
if (typeof module !== "undefined") module.exports = answers;
