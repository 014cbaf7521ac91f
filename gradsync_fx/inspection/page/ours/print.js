// For paper the page is light, what is folded is open but for code, and the graph is a picture as wide as the paper.

function preparePrint(graph) {
  const root = document.documentElement;
  const folded = () => [...document.querySelectorAll("details:not(.code, #sides, [open])")];
  let opened = [];
  let theme;
  let picture;
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    opened = folded();
    for (const box of opened) {
      box.fill();
      box.open = true;
    }
    graph.restyle();
    picture = el("img", { class: "printed", alt: "The step’s graph", src: graph.picture() });
    byId("graph-body").append(picture);
  });
  addEventListener("afterprint", () => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    for (const box of opened) box.open = false;
    picture.remove();
    graph.restyle();
  });
}
