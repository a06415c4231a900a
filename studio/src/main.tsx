import { render } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import "./app.css";
import { get, hasToken, onToken, setToken, type Model } from "./api.ts";
import { Generate } from "./generate.tsx";
import { Live } from "./live.tsx";
import { Models } from "./models.tsx";
import { Classify, Embed, Score } from "./others.tsx";
import { Translate } from "./translate.tsx";
import { Problem } from "./ui.tsx";

type View = "translate" | "generate" | "chat" | "score" | "classify" | "embed" | "models" | "live";
const NAMES: Record<View, string> = {
  translate: "Translate", generate: "Generate", chat: "Chat", score: "Score", classify: "Classify", embed: "Embed", models: "Models", live: "Live",
};

/** The task follows the model. */
function tasks(model: Model | undefined): View[] {
  switch (model?.task) {
    case "translate": return model.feature_width ? ["translate"] : ["translate", "score"];
    case "generate": return model.chat ? ["generate", "chat", "score"] : ["generate", "score"];
    case "classify": return ["classify", "embed"];
    case "embed": return ["embed"];
    default: return [];
  }
}

function App() {
  const [models, setModels] = useState<Model[]>([]);
  const [listed, setListed] = useState(false); // before that it is not known which view is meant
  const [error, setError] = useState<unknown>(null);
  const [chosen, setChosen] = useState("");
  const [view, setView] = useState<View>((location.hash.slice(1) as View) || "translate");
  const load = () => get<{ models: Model[] }>("v1/models").then((found) => { setModels(found.models); setListed(true); setError(null); }, setError);
  useEffect(() => { load(); return onToken(load); }, []);
  useEffect(() => {
    const follow = () => setView((location.hash.slice(1) as View) || "translate");
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const key = (model: Model) => `${model.name}/${model.version}`;
  const model = models.find((each) => key(each) === chosen) ?? models.find((each) => each.default) ?? models[0];
  const able = tasks(model);
  const shown: View = view === "models" || view === "live" || able.includes(view) ? view : able[0] ?? "models";
  const views: View[] = [...able, "models", "live"];
  useEffect(() => { document.title = `${NAMES[shown]} · beamline studio`; }, [shown]);
  const captions = !!model?.feature_width;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the view</a>
      <header class="top">
        <h1><img src="studio/icon.svg" alt="" width={26} height={26} /> beamline <span>studio</span></h1>
        <nav aria-label="views">
          {views.map((each) => <a key={each} href={`#${each}`} aria-current={each === shown ? "page" : undefined}>{each === "translate" && captions ? "Captions" : NAMES[each]}</a>)}
          <a href="docs">API</a>
        </nav>
        <div class="right">
          {models.length > 0 && able.includes(shown) && <label class="choice">Model <select id="model" value={model ? key(model) : ""} onChange={(event) => setChosen(event.currentTarget.value)}>
            {models.map((each) => <option key={key(each)} value={key(each)}>{each.name}{models.filter((other) => other.name === each.name).length > 1 ? ` (${each.version})` : ""}</option>)}
          </select></label>}
          <TokenBox />
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        <Problem error={error} />
        {shown === "models" ? (listed || view === "models") && <Models models={models} refresh={load} /> : shown === "live" ? <Live /> : model && (
          shown === "translate" ? <Translate key={key(model)} model={model} />
            : shown === "generate" || shown === "chat" ? <Generate key={key(model) + shown} model={model} chat={shown === "chat"} />
            : shown === "score" ? <Score key={key(model)} model={model} />
            : shown === "classify" ? <Classify key={key(model)} model={model} /> : <Embed key={key(model)} model={model} />
        )}
      </main>
      <footer>Everything on this page comes from this server. <a href="openapi.json">OpenAPI</a> · <a href="studio/licences.txt">licences</a></footer>
    </>
  );
}

function TokenBox() {
  const [open, setOpen] = useState(false);
  const [set, setSet] = useState(hasToken());
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => onToken(() => setSet(hasToken())), []);
  useLayoutEffect(() => { if (open) field.current?.focus(); }, [open]);
  const use = (event: Event) => { event.preventDefault(); setToken(field.current!.value); field.current!.value = ""; setOpen(false); };
  return (
    <div class="token" onKeyDown={(event) => { if (event.key === "Escape") setOpen(false); }}>
      <button type="button" class="quiet" aria-expanded={open} onClick={() => setOpen(!open)}>{set ? "Token ✓" : "Token"}</button>
      {open && <form class="popover" onSubmit={use}>
        <label class="field"><span>Bearer token</span><input ref={field} id="token" type="password" autocomplete="off" /></label>
        <p class="hint">Where the server wants one. It is kept in this tab’s memory only, and gone when the tab is.</p>
        <div class="row"><button class="primary">Use it</button>{set && <button type="button" class="quiet" onClick={() => { setToken(""); setOpen(false); }}>Forget it</button>}</div>
      </form>}
    </div>
  );
}

render(<App />, document.getElementById("app")!);
