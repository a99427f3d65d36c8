import { counted, duration, joined, percent, threeDigits } from "./format.js";

/**
 * The statistics of one answer, as a line of text.
 *
 * While the answer arrives, the page counts tokens itself; at the end, the server's own numbers
 * replace these.
 */
export class AnswerStats {
  // The time at which the question was sent.
  #startMs;
  // The time at which the last chunk arrived.
  #nowMs;
  // The time and the number of the tokens that arrived first; null before that.
  #first = null;
  // The number of tokens of the answer so far, without the end-of-text token, as the server's
  // `usage` counts them.
  #nTokens = 0;
  // The number of these that were drafted, and of all drafted positions.
  #nAccepted = 0;
  #nPositions = 0;
  // The server's last report on how much of the prompt it has read.
  #promptProgress = null;
  // The server's statistics, which arrive with the last chunk.
  #timings = null;
  #speculative = null;
  // The event that ends an answer.
  #finished = null;

  /** @param {number} nowMs - the time at which the question is sent */
  constructor(nowMs) {
    this.#startMs = nowMs;
    this.#nowMs = nowMs;
  }

  /** Count a chunk of the answer, which arrived at `nowMs`. */
  add(chunk, nowMs) {
    const events = chunk.events ?? [];
    this.#nowMs = nowMs;
    events.forEach((event) => this.#count(event));
    if (this.#nTokens > 0) {
      this.#first ??= { atMs: nowMs, nTokens: this.#nTokens };
    }
    this.#promptProgress = chunk.prompt_progress ?? this.#promptProgress;
    this.#finished = events.find(({ event }) => event === "finished") ?? this.#finished;
    if (chunk.timings) {
      this.#timings = chunk.timings;
      this.#speculative = chunk.speculative ?? null;
    }
  }

  /** The length of the prompt and the answer in tokens; 0 if the server did not report it. */
  get nContextTokens() {
    if (this.#timings === null) {
      return 0;
    }
    const { cache_n, prompt_n, predicted_n } = this.#timings;
    return cache_n + prompt_n + predicted_n;
  }

  /** The numbers of target passes that added one, two, ... tokens; empty without drafts. */
  get passesByTokens() {
    return this.#finished?.n_drafted ? this.#finished.rounds_by_tokens : [];
  }

  /** Return the statistics of an answer that is still arriving. */
  running() {
    if (this.#first === null) {
      return promptText(this.#promptProgress);
    }
    return joined(
      counted(this.#nTokens, "token"),
      this.#runningSpeed(),
      acceptance(this.#nAccepted, this.#nPositions),
    );
  }

  /** Return the statistics of an answer that has ended. */
  final() {
    if (this.#timings === null) {
      return this.#first === null ? "" : this.running();
    }
    return joined(
      counted(this.#timings.predicted_n, "token"),
      finalSpeed(this.#timings),
      this.#speedup(),
      tokensPerPass(this.#speculative),
      this.#timeToFirstToken(),
      promptTokens(this.#timings),
      finalAcceptance(this.#speculative),
    );
  }

  #count(event) {
    if (event.event === "drafted") {
      this.#nPositions += levels(event.nodes);
    } else if (event.event === "committed") {
      this.#nTokens = event.n_tokens;
      this.#nAccepted += event.pieces.filter(({ kind }) => kind === "accepted").length;
    }
  }

  #runningSpeed() {
    const seconds = (this.#nowMs - this.#first.atMs) / 1000;
    if (seconds <= 0) {
      return "";
    }
    return `${threeDigits((this.#nTokens - this.#first.nTokens) / seconds)} tokens/s`;
  }

  #speedup() {
    const range = this.#speculative?.estimated_speedup_range;
    if (!range) {
      return "";
    }
    const { estimate_is_rough, estimated_speedup } = this.#speculative;
    if (!estimate_is_rough) {
      return speedupText(range);
    }
    const times = `about ${estimated_speedup.toFixed(1)} times`;
    return `${times} as fast as without drafts (rough: the machine was busy)`;
  }

  #timeToFirstToken() {
    if (this.#first === null) {
      return "";
    }
    return `first token after ${duration(this.#first.atMs - this.#startMs)}`;
  }
}

// The progress of the prefill. Cached tokens take no time, so they are left out of the estimate.
function promptText(progress) {
  const nPrefilled = progress === null ? 0 : progress.processed - progress.cache;
  if (nPrefilled <= 0) {
    return "prefilling the prompt";
  }
  const nLeft = progress.total - progress.processed;
  const leftMs = (nLeft * progress.time_ms) / nPrefilled;
  const share = percent(progress.processed / progress.total);
  const total = counted(progress.total, "token");
  return `prefilling the prompt: ${share} of ${total}, ${duration(leftMs)} left`;
}

function finalSpeed({ predicted_per_second }) {
  return predicted_per_second ? `${threeDigits(predicted_per_second)} tokens/s` : "";
}

// The range that contains the speed-up. A range around 1 is neither a gain nor a loss.
function speedupText(range) {
  const [low, high] = range.map((value) => value.toFixed(1));
  const times = low === high ? `${low} times` : `${low} to ${high} times`;
  const isClear = Number(low) > 1 || Number(high) < 1;
  if (isClear) {
    return `${times} as fast as without drafts`;
  }
  return `about as fast as without drafts (${times})`;
}

function tokensPerPass(speculative) {
  if (!speculative?.n_drafted) {
    return "";
  }
  return `${speculative.mean_accepted_length.toFixed(1)} tokens per target pass`;
}

function promptTokens({ prompt_n, cache_n }) {
  const total = counted(prompt_n + cache_n, "prompt token");
  return cache_n > 0 ? `${total}, ${cache_n} of them cached` : total;
}

function finalAcceptance(speculative) {
  if (!speculative?.n_drafted) {
    return "";
  }
  const nPositions = speculative.drafted_by_position.reduce((sum, n) => sum + n, 0);
  return acceptance(speculative.n_accepted, nPositions);
}

// The share of drafted positions at which a token was accepted. Branches of a tree share theirs.
function acceptance(nAccepted, nPositions) {
  if (nPositions === 0) {
    return "";
  }
  const rate = percent(nAccepted / nPositions);
  return `${nAccepted} of ${nPositions} drafted tokens accepted (${rate})`;
}

// The number of levels of a draft tree.
function levels(nodes) {
  const depths = [];
  for (const { parent } of nodes) {
    depths.push(parent < 0 ? 1 : depths[parent] + 1);
  }
  return Math.max(0, ...depths);
}
