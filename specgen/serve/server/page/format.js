// Numbers, times and lists as short texts.

/** Return all parts that are not empty, in one line. */
export function joined(...parts) {
  return parts.filter((part) => part !== "").join(" · ");
}

/** Return a number with its noun: "1 token", "2 tokens". */
export function counted(n, noun) {
  return n === 1 ? `${n} ${noun}` : `${n} ${noun}s`;
}

export function percent(share) {
  return `${Math.round(100 * share)}%`;
}

/** Return a number with three significant digits, or with all digits before the point. */
export function threeDigits(value) {
  if (value >= 100) {
    return value.toFixed(0);
  }
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function duration(milliseconds) {
  if (milliseconds < 999.5) {
    return `${milliseconds.toFixed(0)} ms`;
  }
  return `${threeDigits(milliseconds / 1000)} s`;
}

/** Return a time as a short text: the hour if it was today, otherwise the day. */
export function dateText(timeMs) {
  const time = new Date(timeMs);
  const now = new Date();
  if (time.toDateString() === now.toDateString()) {
    return time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  }
  const isThisYear = time.getFullYear() === now.getFullYear();
  const year = isThisYear ? undefined : "numeric";
  return time.toLocaleDateString([], { day: "numeric", month: "short", year });
}
