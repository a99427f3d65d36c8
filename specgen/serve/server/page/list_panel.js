// On narrow screens, the list of conversations covers the page while it is open.

const openButton = document.getElementById("open-list");
const coveredParts = document.querySelectorAll("header, main, #inspector, #composer");

/** Let the buttons open and close the list. */
export function listenToListPanel() {
  openButton.addEventListener("click", () => {
    setOpen(true);
    document.getElementById("close-list").focus();
  });
  document.getElementById("close-list").addEventListener("click", closeList);
  // Wide screens show the list at all times.
  matchMedia("(min-width: 60rem)").addEventListener("change", () => setOpen(false));
}

export function isListOpen() {
  return document.body.classList.contains("list-open");
}

export function closeList() {
  if (isListOpen()) {
    setOpen(false);
    openButton.focus();
  }
}

function setOpen(isOpen) {
  document.body.classList.toggle("list-open", isOpen);
  openButton.ariaExpanded = String(isOpen);
  for (const part of coveredParts) {
    part.inert = isOpen;
  }
}
